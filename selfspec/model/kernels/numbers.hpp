// The numbers of a model, float32 or bfloat16, and this processor's vectors.
//
// Compiled with BFLOAT16=0 (float32) or 1 (bfloat16).

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if BFLOAT16 && defined(__AMX_BF16__)
#define TILES
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else  // NEON, or generic vectors of the compiler
constexpr int LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// Before a loop of constant length, so that its results stay in registers.
#define UNROLL _Pragma("GCC unroll 32")

// Keeps a vector in an AVX2 register: compilers would reload it for each row; loads are the limit.
inline Bits hold(Bits vector) {
#if defined(__AVX__) && !defined(__AVX512F__)
  asm("" : "+x"(vector));
#endif
  return vector;
}

// Forces earlier stores to memory, since compilers do not know what tiles read.
inline void written(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

inline float wide(float value) { return value; }

// bfloat16: the upper half of a float.
inline float wide(uint16_t value) { return std::bit_cast<float>(uint32_t(value) << 16); }

#if BFLOAT16

using Number = uint16_t;

inline Number narrow(float value) {  // to the nearest, ties to even
  const auto bits = std::bit_cast<uint32_t>(value);
  return Number(value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
}

#else

using Number = float;

inline Number narrow(float value) { return value; }

#endif
