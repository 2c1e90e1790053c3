// The dense features of a column of numbers or vectors, or of a part of times.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "jaxrec/serving/column_encoding.h"
#include "raw_values.h"

namespace jaxrec::serving {

inline std::string short_number(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

// Mean and standard deviation of a column in training.
struct Moments {
  double mean;
  double scale;
};

class DenseEncoder {
 public:
  DenseEncoder(const DenseColumn& column, Moments moments) : column_(column), moments_(moments) {}

  const std::string& name() const { return column_.name; }
  size_t size() const { return column_.size(); }

  // Columns of the request: that of the values, and for some ages that of the times before them.
  std::vector<std::string> inputs() const {
    if (!column_.part) return {name()};
    if (!column_.since) return {time_of(name())};
    return {time_of(name()), *column_.since};
  }

  // Writes the features of a sample, whose values are those of `inputs`.
  void encode(const std::vector<const Json*>& values, int64_t sample, float* features) const {
    const Json& value = (*values[0])[static_cast<size_t>(sample)];
    if (column_.width) return encode_vector(value, sample, features);
    if (!column_.part) {
      *features = encode_number(read(value, sample), sample);
      return;
    }
    const std::optional<int64_t> time = read_time(value, time_of(name()), sample);
    // Without `since` an age counts from 1970 here, and from the origin in `transform`.
    std::optional<int64_t> start = 0;
    if (column_.since) {
      start = read_time((*values[1])[static_cast<size_t>(sample)], *column_.since, sample);
    }
    double number;
    if (!time || !start) {
      number = missing(sample);
    } else if (*column_.part == TimePart::kAge) {
      number = present(days(*time) - days(*start));
    } else {
      number = present(static_cast<double>(part_of(*time, *column_.part)));
    }
    *features = encode_number(number, sample);
  }

 private:
  float encode_number(double number, int64_t sample) const {
    const auto encoded = static_cast<float>(transform(number, sample));
    if (!std::isfinite(encoded)) {
      throw RequestError(in_row(name(), sample) + "the number " + short_number(number) +
                         " does not fit float32; take its log");
    }
    return encoded;
  }

  void encode_vector(const Json& value, int64_t sample, float* features) const {
    if (value.is_null()) {
      if (column_.missing == DenseColumn::Missing::kError) {
        throw RequestError(in_row(name(), sample) +
                           "the vector is null; fill it, or give missing: zero in the schema");
      }
      std::fill_n(features, size(), 0.0f);
      return;
    }
    if (!value.is_array()) {
      throw RequestError(in_column(name(), sample) + "expected a list of numbers or null, got " +
                         excerpt(value));
    }
    if (value.size() != size()) {
      throw RequestError(in_row(name(), sample) + "the vector has " +
                         std::to_string(value.size()) + " numbers, and others have " +
                         std::to_string(size()) + "; make it null");
    }
    for (size_t i = 0; i < size(); ++i) {
      if (!value[i].is_number()) {
        throw RequestError(in_column(name(), sample) + "expected a number, got " +
                           excerpt(value[i]));
      }
      const auto number = value[i].get<double>();
      if (!(std::fabs(number) <= static_cast<double>(std::numeric_limits<float>::max()))) {
        throw RequestError(in_row(name(), sample) + "the vector has the number " +
                           short_number(number) +
                           ", which float32 does not hold; make it null");
      }
      features[i] = static_cast<float>(transform_of_vector(present(number)));
      if (!std::isfinite(features[i])) {
        throw RequestError(in_row(name(), sample) +
                           "a number of the vector does not fit float32; scale the vectors");
      }
    }
  }

  double transform_of_vector(double number) const {
    if (column_.transform != DenseColumn::Transform::kLogCounts) return transform(number, 0);
    return std::log(std::max(std::trunc(number), -2.0) + 3.0);
  }

  double read(const Json& value, int64_t sample) const {
    if (column_.is_boolean && value.is_boolean()) {
      return present(value.get<bool>() ? 1.0 : 0.0);
    }
    if (!column_.is_boolean && value.is_number()) return present(value.get<double>());
    if (!value.is_null()) {
      const char* wanted = column_.is_boolean ? "true, false" : "a number";
      throw RequestError(in_column(name(), sample) + "expected " + wanted + " or null, got " +
                         excerpt(value));
    }
    return missing(sample);
  }

  // Returns the number that stands for a null.
  double missing(int64_t sample) const {
    if (column_.missing == DenseColumn::Missing::kError) {
      throw RequestError(in_row(name(), sample) +
                         "the number is null; fill it, or give missing: zero in the schema");
    }
    return column_.missing == DenseColumn::Missing::kMean ? moments_.mean : days(column_.origin);
  }

  // Returns the logarithm of a number that is there if the mean is one of logarithms.
  double present(double number) const {
    if (column_.transform != DenseColumn::Transform::kLogStandardize) return number;
    return signed_log1p(number);
  }

  static double signed_log1p(double number) {
    return std::copysign(std::log1p(std::fabs(number)), number);
  }

  double transform(double number, int64_t sample) const {
    using Transform = DenseColumn::Transform;
    const bool is_standardized = column_.transform == Transform::kStandardize ||
                                 column_.transform == Transform::kLogStandardize;
    // A mean takes its origin with it.
    if (!is_standardized) number -= days(column_.origin);
    switch (column_.transform) {
      case Transform::kStandardize:
      case Transform::kLogStandardize:
        return (number - moments_.mean) / moments_.scale;
      case Transform::kLog1p: return signed_log1p(number);
      case Transform::kLogCounts: {
        constexpr double kMost = 9223372036854775808.0;  // 2**63
        if (number < -kMost || number >= kMost) {
          throw RequestError(in_row(name(), sample) + "the number " + short_number(number) +
                             " is not a count of 64 bits");
        }
        const auto count = std::max<int64_t>(static_cast<int64_t>(number), -2);
        return std::log(static_cast<float>(count) + 3.0f);
      }
      default: return number;
    }
  }

  const DenseColumn column_;
  const Moments moments_;
};

}  // namespace jaxrec::serving
