/* cuda_headers.cpp -- checks csrc/cuda/cudart_calls.h against CUDA's own
 * headers: compiling is the test. Constants are equal; functions match the
 * prototypes, where an enumeration may be an int and a handle a void *. */
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cudart_calls.h"

template <typename T> using plain = std::remove_cv_t<T>;

/* Handles are pointers to opaque structs. */
template <typename T>
constexpr bool is_opaque = std::is_void_v<T> || std::is_class_v<T>;

template <typename Ours, typename Theirs>
constexpr bool
fits()
{
    using O = plain<Ours>;
    using T = plain<Theirs>;

    if constexpr (std::is_pointer_v<O> && std::is_pointer_v<T>) {
        using to_o = std::remove_pointer_t<O>;
        using to_t = std::remove_pointer_t<T>;

        if constexpr (is_opaque<plain<to_o>> || is_opaque<plain<to_t>>)
            return is_opaque<plain<to_o>> && is_opaque<plain<to_t>> &&
                   std::is_const_v<to_o> == std::is_const_v<to_t>;
        else
            return std::is_const_v<to_o> == std::is_const_v<to_t> &&
                   fits<to_o, to_t>();
    } else if constexpr (std::is_enum_v<T>) {
        return std::is_same_v<O, int> && sizeof(T) == sizeof(int);
    } else {
        return std::is_same_v<O, T>;
    }
}

template <typename Ours, typename Theirs> struct same_call : std::false_type {
};

template <typename R, typename... P, typename S, typename... Q>
struct same_call<R(P...), S(Q...)> {
    static constexpr bool
    compare()
    {
        if constexpr (sizeof...(P) == sizeof...(Q))
            return fits<R, S>() && (... && fits<P, Q>());
        return false;
    }
    static constexpr bool value = compare();
};

#define CHECK_CALL(result, name, params)                                       \
    static_assert(same_call<result params, decltype(name)>::value,             \
                  "the prototype of " #name);
CER_CUDART_LIST(CHECK_CALL)
CER_CUDA_DRIVER_LIST(CHECK_CALL)
CER_CUDA_ENTRY_LIST(CHECK_CALL)

#define CHECK_NUMBER(ours, value, theirs)                                      \
    static_assert((int)ours == (int)theirs, #theirs);
CER_CUDA_NUMBERS(CHECK_NUMBER)

static_assert((int)CUDA_ERROR_OUT_OF_MEMORY == (int)cudaErrorMemoryAllocation,
              "codes of the driver and of the runtime");
static_assert((int)CUDA_ERROR_ILLEGAL_ADDRESS == (int)cudaErrorIllegalAddress,
              "codes of the driver and of the runtime");
