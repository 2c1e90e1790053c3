// Conversions of 16-bit floats, rounded to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxrec::serving {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float from_bfloat16(uint16_t half) { return float_of(uint32_t{half} << 16); }

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // of finite numbers
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 0) {  // zero, or subnormal: mantissa * 2^-24
    return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  }
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float magnitude = float_of(bits & 0x7fffffff);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;  // infinity
  if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 leaves multiples of 2^-24, rounded
    return static_cast<uint16_t>(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t rounded = bits_of(magnitude) + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - (112u << 23)) >> 13);
}

}  // namespace jaxrec::serving
