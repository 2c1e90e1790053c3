// The programs of an exported ranker, and the caches of histories that they make and read;
// jaxrec/serve/artifact/ranker_spec.py describes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "jaxrec/serving/batch_spec.h"

namespace jaxrec::serving {

// A number of events that histories are encoded for.
struct CacheSize {
  int64_t events = 0;             // of a history at most
  std::vector<ArraySpec> arrays;  // of its cache, each with one more axis of 1 in front
};

enum class RankerStep { kEncode, kAppend, kScore };

struct RankerProgram {
  std::string platform;
  RankerStep step = RankerStep::kEncode;
  int64_t events = 0;  // the history size
  int64_t count = 0;   // of candidates, or of new events; 0 for kEncode
  std::string file;
  std::vector<std::string> targets;  // functions of libjaxrec.so that it calls
  std::string stablehlo;             // the file that this library reads
};

struct RankerSpec {
  std::vector<std::string> context;         // the first features of the batch's history
  std::optional<std::string> request_time;  // feature of the candidates whose last value a history
                                            // is encoded for
  std::vector<CacheSize> caches;            // ascending
  std::vector<int64_t> candidate_sizes;     // ascending
  std::vector<int64_t> append_sizes;        // ascending; empty: caches do not grow
  std::vector<RankerProgram> programs;
};

}  // namespace jaxrec::serving
