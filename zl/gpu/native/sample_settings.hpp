// A row's settings and what follows from them alone. Those of the build's profiles are worked out by the compiler and the
// row's code is made for them; any other row's are worked out at each draw, by the same function, to the same bits.
#pragma once
#include <float.h>

namespace {

constexpr int kFloors = 8;
constexpr double kFloorStep = 4;
constexpr float kMinTemperature = 5e-7f;  // half of the wire's unit; below is greedy
constexpr double kLog2e = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

// Natural logarithm of a positive number, by 2 artanh((x - 1) / (x + 1)). The library's may differ in its last bit
// between compiler and run time.
constexpr double ln(double x) {
    int e = 0;
    for (; x < 0.75; x *= 2) e--;
    for (; x >= 1.5; x /= 2) e++;
    const double t = (x - 1) / (x + 1), square = t * t;
    double sum = 0;
    for (int i = 31; i >= 1; i -= 2) sum = sum * square + 1.0 / i;
    return 2 * t * sum + e * kLn2;
}

struct Settings {
    float temperature, top_p, penalty;
    bool greedy, all, penalised;  // all: no top-p
    float k_high, k_low;          // log2(e) / T in two parts, so that an exponent's fraction is right to its last bit
    double rest;                  // the share of the mass that top-p leaves out at most
    // Tokens below a floor under the maximum are no candidates of top-p. Floors are tried from floor[0] = T ln(rest) down, a
    // factor of kFloorStep in weight apart; how many a row needs decides the speed only. With a share of `sure` * mass /
    // vocab all that is below has less than half of `rest` together, which always suffices.
    double sure, share[kFloors];
    float floor[kFloors];
};

constexpr Settings settings_of(float temperature, float top_p, float penalty) {
    Settings s{temperature, top_p >= 0 ? top_p : 0.0f, penalty, !(temperature >= kMinTemperature), top_p >= 1.0f,
               penalty != 1.0f, 0, 0, 0, 0, {}, {}};
    if (s.greedy) return s;
    const double k = kLog2e / temperature;
    s.k_high = (float)k;
    s.k_low = (float)(k - s.k_high);
    if (s.all) return s;
    s.rest = 1.0 - (double)s.top_p;  // from 2^-24 on
    s.sure = s.rest / 2;
    const double top = temperature * ln(s.rest), step = temperature * ln(kFloorStep);
    double share = s.rest;
    for (int j = 0; j < kFloors; j++, share /= kFloorStep) s.share[j] = share, s.floor[j] = (float)(top - j * step);
    return s;
}

struct Profile {
    float temperature, top_p, penalty;
};

// build.py passes the build's table of profiles.
#ifdef ZL_PROFILES
constexpr Profile kProfiles[] = {ZL_PROFILES};
constexpr int kProfileCount = sizeof kProfiles / sizeof kProfiles[0];
#else
constexpr Profile kProfiles[1] = {};
constexpr int kProfileCount = 0;
#endif

template <int N>
struct Baked {
    static constexpr int index = N;
    static constexpr Settings of = settings_of(kProfiles[N].temperature, kProfiles[N].top_p, kProfiles[N].penalty);
    static constexpr const Settings& get() { return of; }
};
struct Own {
    static constexpr int index = kProfileCount;
    Settings of;
    const Settings& get() const { return of; }
};

// Calls f with the settings of these values: Baked where a profile has them, else Own.
template <int N = 0, class F>
inline auto with_settings(float temperature, float top_p, float penalty, F&& f) {
    if constexpr (N < kProfileCount) {
        const Profile& p = kProfiles[N];
        if (temperature == p.temperature && top_p == p.top_p && penalty == p.penalty) return f(Baked<N>{});
        return with_settings<N + 1>(temperature, top_p, penalty, f);
    } else {
        return f(Own{settings_of(temperature, top_p, penalty)});
    }
}

}  // namespace
