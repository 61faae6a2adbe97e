// Worker threads, futex words and the self-scheduling stages of a step.
// State: a Team owns its threads and the submit/complete counters. A stage ends when all its items are done, not when
// all threads have arrived: a worker that the kernel put aside between items holds nobody up.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace zl {

constexpr int kMaxThreads = 256;  // shapes.MAX_THREADS

// A counter that threads can wait on: spins for a while, then sleeps in the kernel.
struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void add(uint32_t n);                               // adds and wakes
    void set(uint32_t v);                               // stores and wakes
    bool raise(uint32_t from, uint32_t to);             // compare and swap; wakes on success
    void wait(uint32_t target, int spins);              // until value >= target (modulo 2^32)
    bool reached(uint32_t target) const { return (int32_t)(value.load(std::memory_order_acquire) - target) >= 0; }
    void wake();
};

struct alignas(64) Cursor {
    std::atomic<int> next{0};
};

constexpr int kStageSpins = 2500;  // about 100 us of `pause`: longer than any balanced wait, shorter than a time slice
constexpr int kIdleSpins = 1500;

// One parallel loop of a step. Each thread has its own range of the items and takes from others' when it is through.
struct Stage {
    Word done;
    Cursor next[kMaxThreads];
};

class StageList {
  public:
    explicit StageList(int n) : n_(n), stages_(new Stage[n]) {}
    void reset(int n_threads);
    Stage& at(int i) { return stages_[i]; }
    int size() const { return n_; }

  private:
    int n_;
    std::unique_ptr<Stage[]> stages_;
};

// A thread's view of the step that it runs.
struct Worker {
    int index, n_threads;
    StageList* stages;
    int at = 0;

    // The first of this thread's own items of a loop of n.
    int first(int n) const { return (int)((int64_t)n * index / n_threads); }

    // Calls f(begin, end, limit) for chunks of [0, n); limit ends the contiguous range that the chunk was cut from.
    // Then calls finish(), after which this thread's part must be done.
    template <class F, class G>
    void run(int n, int chunk, F&& f, G&& finish) {
        Stage& s = stages->at(at++);
        if (n <= 0) return;
        uint32_t mine = 0;
        for (int v = 0; v < n_threads; v++) {
            int who = index + v;
            if (who >= n_threads) who -= n_threads;
            const int lo = (int)((int64_t)n * who / n_threads), hi = (int)((int64_t)n * (who + 1) / n_threads);
            for (;;) {
                int a = lo + s.next[who].next.fetch_add(chunk, std::memory_order_relaxed);
                if (a >= hi) break;
                int b = a + chunk < hi ? a + chunk : hi;
                f(a, b, hi);
                mine += (uint32_t)(b - a);
            }
        }
        finish();
        if (n_threads == 1) return;
        if (mine) s.done.add(mine);
        s.done.wait((uint32_t)n, kStageSpins);
    }
    template <class F>
    void run(int n, int chunk, F&& f) {
        run(n, chunk, f, [] {});
    }
};

// What a team runs: `plan` once per step by one thread, then `work` by every thread.
struct Job {
    virtual ~Job() = default;
    virtual void plan(int slot) = 0;
    virtual void work(Worker& w) = 0;
};

class Team {
  public:
    Team(int n_threads, int n_stages, Job* job);
    ~Team();
    void start();
    void stop();
    uint32_t launch(int slot);
    void wait(uint32_t seq);
    void settle(uint32_t seq);  // until every thread has left step `seq`
    uint32_t launched() const { return submitted_.value.load(); }
    int size() const { return n_; }

  private:
    void loop(int t);

    int n_;
    Job* job_;
    StageList stages_;
    std::vector<std::thread> threads_;
    std::vector<int> cpus_;
    Word submitted_, planned_, completed_, left_;
    std::atomic<bool> stop_{false};
    int ring_[8];
};

// Runs f(begin, end) over [0, n) on n_threads fresh threads; for work outside of steps.
template <class F>
void scatter(int n_threads, int n, F&& f) {
    std::vector<std::thread> pool;
    for (int t = 1; t < n_threads; t++)
        pool.emplace_back([=] { f((int)((int64_t)n * t / n_threads), (int)((int64_t)n * (t + 1) / n_threads)); });
    f(0, n / n_threads);
    for (auto& p : pool) p.join();
}

}  // namespace zl
