// Reads changed manifests, requests, npy files, vocabularies and programs, which must be refused or
// be what they say.
//
//     jaxrec_fuzz MODEL REQUESTS RUNS SEED
//
// MODEL is an exported model or ranker, REQUESTS a file with valid requests for it in JSON lines: of
// raw columns where the model was exported with their encoder. A run that crashes, or throws
// anything but the errors of this library, ends the program; build it with sanitizers. The same seed
// makes the same runs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "batch_ladder.h"
#include "checksums.h"
#include "jaxrec/serving/encoder.h"
#include "jaxrec/serving/error.h"
#include "jaxrec/serving/request.h"
#include "jaxrec/serving/scores.h"
#include "mutate.h"
#include "npy.h"
#include "program_calls.h"
#include "ranker_rows.h"
#include "vocabulary.h"

namespace {

using namespace jaxrec::serving;

constexpr int64_t kMostPacked = int64_t{1} << 22;  // elements of a batch that a run packs

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "jaxrec_fuzz: %s\n", what);
  std::abort();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(static_cast<bool>(file), path.c_str());
  return {std::istreambuf_iterator<char>(file), {}};
}

// Elements of the arrays of a batch.
int64_t elements_of(const BatchSpec& spec, const BatchSize& size) {
  int64_t elements = 0;
  for (const InputSpec& input : spec.inputs) {
    if (const auto* array = std::get_if<ArraySpec>(&input)) {
      elements += array->elements() * size.samples;
    } else {
      elements += size.samples * static_cast<int64_t>(std::get<RaggedSpec>(input).features.size());
    }
  }
  for (const auto& capacities : size.capacities) {
    for (const int64_t capacity : capacities) elements += capacity;
  }
  return elements;
}

// Packs a valid request, and holds the arrays to it.
void check_packing(const BatchSpec& spec, const Request& request) {
  for (int64_t start = 0; start < request.samples;) {
    const Chunk chunk = next_chunk(spec, request, start);
    require(chunk.start == start && chunk.stop > start && chunk.stop <= request.samples,
            "a chunk has samples of none");
    if (elements_of(spec, spec.sizes[chunk.size]) > kMostPacked) return;
    const PackedChunk packed = pack(spec, request, chunk);
    const Request part = slice(spec, request, chunk.start, chunk.stop);
    size_t array = 0;
    for (size_t i = 0; i < spec.inputs.size(); ++i) {
      const auto* ragged = std::get_if<RaggedSpec>(&spec.inputs[i]);
      if (ragged == nullptr) {
        ++array;
        continue;
      }
      int64_t ids = 0, total = 0;
      for (const Column& column : std::get<std::vector<Column>>(part.inputs[i])) {
        ids += static_cast<int64_t>(column.ids.size());
      }
      const HostArray& lengths = packed.arrays[array + 1];
      for (int64_t k = 0; k < lengths.shape[0]; ++k) {
        total += static_cast<const int32_t*>(lengths.data)[k];
      }
      require(ids == total, "a chunk lost ids");
      array += ragged->is_weighted ? 3 : 2;
    }
    start = chunk.stop;
  }
}

// Takes the rows of a valid request to a ranker, and holds them to it.
void check_rows(const Manifest& manifest, const Request& request) {
  const RankerSpec& ranker = *manifest.ranker;
  int64_t values = 0, total = 0;
  for (int64_t i = 0; i < request.samples; ++i) {
    const Row row = row_of(ranker, manifest.batch, request, i);
    require(row.history.num_events() <= ranker.caches.back().events, "a history is too long");
    require(row.history.begins(row.history), "a history is not itself");
    for (const auto* features : {&row.history.context, &row.history.events, &row.candidates}) {
      for (const Values& each : *features) total += static_cast<int64_t>(each.size());
    }
  }
  for (const auto& input : request.inputs) {
    for (const Column& column : std::get<std::vector<Column>>(input)) {
      values += static_cast<int64_t>(column.ids.size());
    }
  }
  require(values == total, "rows lost values");
}

// Returns whether the input was taken.
template <class Function>
bool take(Function f) {
  try {
    f();
    return true;
  } catch (const ArtifactError&) {
  } catch (const RequestError&) {
  }
  return false;
}

// Decodes requests as the model that was exported to a folder does.
class Decoder {
 public:
  Decoder(const std::string& model, const Manifest& manifest) : manifest_(manifest) {
    if (manifest.encoding) encoder_.emplace(model, manifest);
  }

  bool take(const std::string& text) const {
    return ::take([&] {
      const Request request = encoder_ ? encoder_->decode(text) : decode_request(manifest_, text);
      if (manifest_.ranker) {
        check_rows(manifest_, request);
      } else {
        check_packing(manifest_.batch, request);
      }
    });
  }

 private:
  const Manifest manifest_;
  std::optional<Encoder> encoder_;
};

// The files of a vocabulary, of which a run changes one.
struct VocabularyContents {
  VocabularyFiles description;
  std::vector<std::string> files;

  VocabularyContents(const std::string& model, const VocabularyFiles& of) : description(of) {
    for (const std::string& file : {of.hashes, of.places, of.values, of.offsets.value_or("")}) {
      files.push_back(file.empty() ? "" : read_file(model + "/" + file));
    }
  }

  bool take_changed(std::mt19937_64& random) const {
    std::vector<std::string> changed = files;
    std::string& one = changed[random() % (description.is_integer ? 3 : 4)];
    one = mutate(one, files, random);
    try {
      const Vocabulary vocabulary(description, {changed[0], changed[1], changed[2], changed[3]});
      for (const std::string& file : files) {
        // Known values are among these.
        for (size_t start = 0; start + 8 < file.size() && start < 2048; ++start) {
          const int64_t row = description.is_integer
                                  ? vocabulary.row(*reinterpret_cast<const int64_t*>(
                                        std::string(file, start, 8).data()))
                                  : vocabulary.row(std::string_view(file).substr(start, start % 9));
          require(row < (int64_t{1} << 32), "a row is too large");
        }
      }
      return true;
    } catch (const std::invalid_argument&) {
    } catch (const ArtifactError&) {
    }
    return false;
  }
};

bool take_npy(const std::string& bytes) {
  try {
    const NpyHeader header = read_npy_header(bytes);
    require(header.data_start <= bytes.size(), "an array begins after its file");
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

bool take_program(const std::string& bytes) {
  try {
    program_calls(bytes);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 5, "usage: jaxrec_fuzz MODEL REQUESTS RUNS SEED");
  const std::string model = argv[1];
  const std::string manifest_text = read_file(model + "/manifest.json");
  const Manifest manifest = parse_manifest(manifest_text);
  const Decoder decoder(model, manifest);
  std::vector<VocabularyContents> vocabularies;
  if (manifest.encoding) {
    for (const CategoricalColumn& column : manifest.encoding->categorical) {
      if (column.vocabulary) vocabularies.emplace_back(model, *column.vocabulary);
    }
  }
  std::vector<std::string> requests;
  std::ifstream lines(argv[2]);
  for (std::string line; std::getline(lines, line);) {
    require(decoder.take(line), "a valid request is refused");
    requests.push_back(line);
  }
  require(!requests.empty(), "REQUESTS has none");
  const std::string npy = read_file(model + "/" + manifest.arrays.at(0).file);
  require(take_npy(npy), "a valid npy file is refused");
  const std::string program =
      read_file(model + "/" + (manifest.ranker ? manifest.ranker->programs.at(0).stablehlo
                                               : manifest.programs.at(0).stablehlo.value()));
  require(take_program(program), "a valid program is refused");
  const std::vector<std::string> manifests = {manifest_text}, arrays = {npy.substr(0, 256)};
  const std::vector<std::string> programs = {program};

  std::mt19937_64 random(std::strtoull(argv[4], nullptr, 10));
  const long long runs = std::atoll(argv[3]);
  long long taken[5] = {};
  for (long long run = 0; run < runs; ++run) {
    const auto kind = static_cast<size_t>(random() % 10);
    if (kind == 0 && !vocabularies.empty() && random() % 2 == 0) {
      taken[3] += vocabularies[random() % vocabularies.size()].take_changed(random);
    } else if (kind == 4) {
      taken[4] += take_program(mutate(program, programs, random));
    } else if (kind == 0) {
      taken[0] += take_npy(mutate(arrays[0], arrays, random));
    } else if (kind < 4) {
      const std::string text = mutate(manifest_text, manifests, random);
      // With the checksum nearly all are refused at once; without, what is read meets a request.
      take([&] { parse_manifest(text); });
      taken[1] += take([&] {
        const Manifest changed = parse_manifest(text, /*with_checksum=*/false);
        Decoder(model, changed).take(requests[random() % requests.size()]);
      });
    } else {
      const std::string& text = requests[random() % requests.size()];
      taken[2] += decoder.take(mutate(text, requests, random));
    }
  }
  std::printf("%lld runs; taken: %lld npy files, %lld manifests, %lld requests, %lld vocabularies, "
              "%lld programs\n",
              runs, taken[0], taken[1], taken[2], taken[3], taken[4]);
}
