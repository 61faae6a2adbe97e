// Futex words, the worker loop and pinning. See threads.hpp.
#include "threads.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace zl {

static void futex_sleep(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, (uint32_t*)word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

// The sleeper count and the value are both sequentially consistent: either the waker sees the sleeper, or the sleeper
// sees the new value (and FUTEX_WAIT compares once more).
void Word::wake() {
    if (sleepers.load()) syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Word::add(uint32_t n) {
    value.fetch_add(n);
    wake();
}

void Word::set(uint32_t v) {
    value.store(v);
    wake();
}

bool Word::raise(uint32_t from, uint32_t to) {
    if (!value.compare_exchange_strong(from, to)) return false;
    wake();
    return true;
}

void Word::wait(uint32_t target, int spins) {
    for (int i = 0; i < spins; i++) {
        if (reached(target)) return;
        _mm_pause();
    }
    sleepers.fetch_add(1);
    for (;;) {
        uint32_t seen = value.load();
        if ((int32_t)(seen - target) >= 0) break;
        futex_sleep(&value, seen);
    }
    sleepers.fetch_sub(1);
}

void StageList::reset(int n_threads) {
    for (int i = 0; i < n_; i++) {
        stages_[i].done.value.store(0, std::memory_order_relaxed);
        for (int t = 0; t < n_threads; t++) stages_[i].next[t].next.store(0, std::memory_order_relaxed);
    }
}

Team::Team(int n_threads, int n_stages, Job* job) : n_(n_threads), job_(job), stages_(n_stages) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int c = 0; c < CPU_SETSIZE; c++)
            if (CPU_ISSET(c, &set)) cpus_.push_back(c);
}

Team::~Team() { stop(); }

void Team::start() {
    for (int t = 0; t < n_; t++) threads_.emplace_back([this, t] { loop(t); });
}

void Team::stop() {
    if (threads_.empty()) return;
    stop_.store(true);
    submitted_.add(1);
    for (auto& t : threads_) t.join();
    threads_.clear();
}

uint32_t Team::launch(int slot) {
    uint32_t seq = submitted_.value.load() + 1;
    ring_[seq % 8] = slot;
    submitted_.add(1);
    return seq;
}

void Team::wait(uint32_t seq) { completed_.wait(seq, 0); }

void Team::settle(uint32_t seq) { left_.wait(seq * (uint32_t)n_, 0); }

void Team::loop(int t) {
    pthread_setname_np(pthread_self(), "zl-compute");
    if (n_ <= (int)cpus_.size()) {  // more workers than CPUs: leave the placing to the kernel
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus_[t], &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    for (uint32_t seq = 1;; seq++) {
        submitted_.wait(seq, kIdleSpins);
        if (stop_.load() && submitted_.value.load() == seq) return;
        if (t == 0) {
            // Stages are reset here, so nobody may still be looking at the step before.
            left_.wait((seq - 1) * (uint32_t)n_, kStageSpins);
            stages_.reset(n_);
            job_->plan(ring_[seq % 8]);
            planned_.set(seq);
        } else {
            planned_.wait(seq, kStageSpins);
        }
        Worker w{t, n_, &stages_};
        job_->work(w);
        completed_.raise(seq - 1, seq);
        left_.add(1);
    }
}

}  // namespace zl
