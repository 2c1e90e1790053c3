// The message about an id that its feature does not have.
#pragma once

#include <cstdint>
#include <string>

#include "jaxrec/serving/manifest.h"

namespace jaxrec::serving {

inline std::string bad_id(const Feature& feature, int64_t sample, const std::string& id,
                          bool is_negative) {
  const std::string start =
      "feature '" + feature.name + "', sample " + std::to_string(sample) + ": id " + id + " ";
  if (feature.num_ids) {
    return start + "is outside [0, " + std::to_string(*feature.num_ids) +
           "), the ids of its table";
  }
  if (is_negative) return start + "is negative; ids are at least 0";
  return start + "does not fit int32 (below 2**31), the type of row indices on a device";
}

}  // namespace jaxrec::serving
