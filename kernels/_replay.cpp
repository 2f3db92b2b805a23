#include <chrono>

#include "_native.h"

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Calls every entry with its slots.  Returns the index of the first entry that returns an error, or -1.
extern "C" int run(int (*const* entries)(const Slot*), const Slot* const* slots, double* seconds, i64 count) {
    for (i64 i = 0; i < count; ++i) {
        const double began = seconds ? now() : 0;
        if (entries[i](slots[i])) return int(i);
        if (seconds) seconds[i] = now() - began;
    }
    return -1;
}
