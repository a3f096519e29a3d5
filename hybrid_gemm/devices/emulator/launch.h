// What the host sees of a kernel, and how it is called.
#pragma once
#include "cuda_threads.h"

namespace emulator {

template <class P>
constexpr char kind() {
    if constexpr (__is_class(P))
        return 'V';
    else if constexpr (__is_same(P, bool))
        return 'b';
    else
        return P(0.5) != 0 ? 'f' : P(-1) < P(0) ? 'i' : 'u';
}
template <class P>
struct Value {
    static constexpr char kind = emulator::kind<P>();
    static constexpr unsigned bytes = sizeof(P);
};
template <class P>
struct Value<P*> {
    static constexpr char kind = 'u';
    static constexpr unsigned bytes = sizeof(P*);
};
template <>
struct Value<void> {
    static constexpr char kind = 'V';
    static constexpr unsigned bytes = 0;
};

template <class P>
constexpr Parameter parameter{Value<P>::kind, 0, Value<P>::bytes};
template <class P>
constexpr Parameter parameter<const P*>{Value<P>::kind, 1, Value<P>::bytes};
template <class P>
constexpr Parameter parameter<P*>{Value<P>::kind, 2, Value<P>::bytes};

template <auto kernel>
struct Entry;
template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
    static_assert((!__is_class(P) && ...), "a kernel takes numbers and pointers");
    struct Call {
        Call(P... p) { kernel(p...); }
    };
    // In braces, unlike in a call, the arguments are taken in order.
    static void call(void** args) { Call{*(P*)*args++...}; }
    static constexpr unsigned count = sizeof...(P);
    static constexpr Parameter parameters[count + 1] = {parameter<P>...};
};

// Launches a kernel: 0, or 1 with a report. `args` point to its arguments.
int run(const Launch* launch, void (*call)(void**), void** args, Report* report);

}  // namespace emulator
