#include "jaxrec/serving/manifest.h"

#include <zlib.h>

#include <algorithm>
#include <stdexcept>

#include "checksums.h"
#include "jaxrec/serving/error.h"
#include "json.h"
#include "read_column_encoding.h"

namespace jaxrec::serving {
namespace {

constexpr std::string_view kFormat = "jaxrec model 1";
constexpr int64_t kMostElements = int64_t{1} << 46;  // of an array
constexpr int64_t kMostBatch = (int64_t{1} << 31) - 1;

using Problem = std::invalid_argument;

// Number of elements of a shape.
int64_t product(const std::vector<int64_t>& shape, const std::string& name) {
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    if (elements > kMostElements / size) throw Problem(name + " is too large");
    elements *= size;
  }
  return elements;
}

DType read_dtype(Fields& fields) {
  const std::string name = fields.string("dtype");
  const std::optional<DType> dtype = dtype_of(name);
  if (!dtype) throw Problem(fields.place() + " is of " + in_quotes(name) + ", which is not served");
  return *dtype;
}

Structure read_structure(const Json& value, const std::string& place) {
  Fields fields(value, place);
  Structure structure;
  const std::string kind = fields.string("kind");
  if (kind == "leaf") {
    structure.kind = Structure::Kind::kLeaf;
  } else if (kind == "dict") {
    structure.kind = Structure::Kind::kDict;
  } else if (kind == "list") {
    structure.kind = Structure::Kind::kList;
  } else if (kind == "tuple") {
    structure.kind = Structure::Kind::kTuple;
  } else {
    throw Problem(place + ": 'kind' is " + in_quotes(kind));
  }
  structure.keys = fields.strings("keys");
  for (const Json& part : fields.list("parts")) {
    structure.parts.push_back(read_structure(part, place));
  }
  fields.finish();
  const size_t keys = structure.kind == Structure::Kind::kDict ? structure.parts.size() : 0;
  if (structure.keys.size() != keys) throw Problem(place + " has another number of keys");
  if (structure.kind == Structure::Kind::kLeaf && !structure.parts.empty()) {
    throw Problem(place + " has a leaf with parts");
  }
  return structure;
}

ArraySpec read_array(Fields& fields) {
  ArraySpec array{fields.string("name"), read_dtype(fields), fields.numbers("shape", 0)};
  if (array.dtype == DType::kFloat8E4M3FN || array.dtype == DType::kFloat8E5M2) {
    throw Problem(array.name + " is of " + std::string(name_of(array.dtype)) +
                  ", which neither inputs nor outputs may be here");
  }
  product(array.shape, array.name);
  return array;
}

RaggedSpec read_ragged(Fields& fields) {
  RaggedSpec ragged;
  ragged.name = fields.string("name");
  for (const Json& value : fields.list("features")) {
    Fields of_feature(value, "a feature of " + ragged.name);
    Feature feature;
    feature.name = of_feature.string("name");
    if (of_feature.has("num_ids")) feature.num_ids = of_feature.number("num_ids", 1, kMostBatch + 1);
    if (of_feature.has("fixed")) feature.fixed = of_feature.number("fixed", 0, kMostBatch);
    of_feature.get("num_ids");
    of_feature.get("fixed");
    of_feature.finish();
    ragged.features.push_back(std::move(feature));
  }
  ragged.is_weighted = fields.boolean("is_weighted");
  return ragged;
}

InputSpec read_input(const Json& value) {
  Fields fields(value, "an input");
  const std::string type = fields.string("type");
  InputSpec input;
  if (type == "array") {
    input = read_array(fields);
  } else if (type == "ragged") {
    input = read_ragged(fields);
  } else {
    throw Problem("an input has the type " + in_quotes(type));
  }
  fields.finish();
  return input;
}

BatchSize read_size(const Json& value) {
  Fields fields(value, "a batch size");
  BatchSize size;
  size.samples = fields.number("samples", 1, kMostBatch);
  for (const Json& capacities : fields.list("capacities")) {
    const Json of_input = {{"capacities", capacities}};
    Fields each(of_input, fields.place());
    size.capacities.push_back(each.numbers("capacities", 0));
  }
  fields.finish();
  return size;
}

BatchSpec read_batch(const Json& value) {
  Fields fields(value, "the batch");
  BatchSpec batch;
  batch.structure = read_structure(fields.get("structure"), "the structure of the inputs");
  for (const Json& input : fields.list("inputs")) batch.inputs.push_back(read_input(input));
  for (const Json& size : fields.list("sizes")) batch.sizes.push_back(read_size(size));
  fields.finish();
  return batch;
}

StoredArray read_stored_array(const Json& value) {
  Fields fields(value, "an array");
  StoredArray array{fields.string("name"), fields.string("file"), read_dtype(fields),
                    fields.numbers("shape", 0)};
  fields.boolean("is_mapped");
  fields.finish();
  product(array.shape, array.name);
  return array;
}

ProgramFile read_program(const Json& value) {
  Fields fields(value, "a program");
  ProgramFile program;
  program.platform = fields.string("platform");
  program.samples = fields.number("samples", 1);
  program.file = fields.string("file");
  program.targets = fields.strings("targets");
  if (value.contains("stablehlo")) fields.get("stablehlo");
  if (fields.has("stablehlo")) program.stablehlo = fields.string("stablehlo");
  fields.finish();
  return program;
}

void check_files(const Manifest& manifest) {
  std::vector<std::string> used;
  for (const StoredArray& array : manifest.arrays) used.push_back(array.file);
  for (const ProgramFile& program : manifest.programs) {
    used.push_back(program.file);
    if (program.stablehlo) used.push_back(*program.stablehlo);
  }
  if (manifest.encoding) {
    for (const std::string& file : manifest.encoding->files()) used.push_back(file);
  }
  for (const std::string& file : used) {
    if (manifest.files.count(file) == 0) {
      throw Problem("it uses " + in_quotes(file) + ", which is not among its files");
    }
  }
  for (const auto& [file, stored] : manifest.files) {
    const std::string inside = "/" + file + "/";
    if (file.empty() || file[0] == '/' || inside.find("/../") != std::string::npos ||
        file.find('\0') != std::string::npos) {
      throw Problem("it names the file " + in_quotes(file) + ", outside of the model's folder");
    }
  }
}

void check_batch(const BatchSpec& batch) {
  std::vector<const RaggedSpec*> ragged;
  for (const InputSpec& input : batch.inputs) {
    if (const auto* each = std::get_if<RaggedSpec>(&input)) ragged.push_back(each);
  }
  if (batch.sizes.empty()) throw Problem("it has no batch sizes");
  int64_t last = 0;
  for (const BatchSize& size : batch.sizes) {
    const std::string name = "a batch of " + std::to_string(size.samples) + " samples";
    if (size.samples <= last) throw Problem("its batch sizes do not ascend");
    last = size.samples;
    if (size.capacities.size() != ragged.size()) {
      throw Problem(name + " has capacities of " + std::to_string(size.capacities.size()) +
                    " inputs, but " + std::to_string(ragged.size()) + " are ragged");
    }
    for (size_t i = 0; i < ragged.size(); ++i) {
      if (size.capacities[i].size() != ragged[i]->features.size()) {
        throw Problem(std::to_string(size.capacities[i].size()) + " capacities for " +
                      std::to_string(ragged[i]->features.size()) + " features");
      }
      int64_t ids = 0;
      for (const int64_t capacity : size.capacities[i]) {
        if (capacity > kMostBatch - ids) throw Problem(name + " has too many ids");
        ids += capacity;
      }
      const auto features = static_cast<int64_t>(ragged[i]->features.size());
      if (features > 0 && size.samples > kMostBatch / features) throw Problem(name + " is too large");
    }
    for (const InputSpec& input : batch.inputs) {
      if (const auto* array = std::get_if<ArraySpec>(&input)) {
        std::vector<int64_t> shape = array->shape;
        shape.push_back(size.samples);
        product(shape, array->name);
      }
    }
  }
}

void check_counts(const Manifest& manifest) {
  const auto check = [](const Structure& structure, size_t listed, const std::string& what) {
    if (structure.num_leaves() != listed) {
      throw Problem("its structure has " + std::to_string(structure.num_leaves()) + " " + what +
                    ", and it lists " + std::to_string(listed));
    }
  };
  check(manifest.batch.structure, manifest.batch.inputs.size(), "inputs");
  check(manifest.output_structure, manifest.outputs.size(), "outputs");
  if (manifest.batch.structure.kind != Structure::Kind::kTuple) {
    throw Problem("its inputs are not a tuple of arguments");
  }
  for (const ProgramFile& program : manifest.programs) {
    const auto has_size = [&](const BatchSize& size) { return size.samples == program.samples; };
    const auto& sizes = manifest.batch.sizes;
    if (std::none_of(sizes.begin(), sizes.end(), has_size)) {
      throw Problem(program.file + " is for " + std::to_string(program.samples) +
                    " samples, which is not one of the batch sizes");
    }
  }
}

Manifest read_manifest(Json content, bool with_checksum) {
  if (!content.is_object() || !content.contains("format")) {
    throw Problem("it is not the manifest of an exported model");
  }
  const Json written = content.contains("crc32") ? content["crc32"] : Json();
  content.erase("crc32");
  if (with_checksum && written != crc32_of(python_json(content))) {
    throw Problem("its checksum does not match: the file was changed");
  }
  Fields fields(content, "it");
  if (const std::string format = fields.string("format"); format != kFormat) {
    throw Problem("its format is " + in_quotes(format) + ", and this program reads " +
                  in_quotes(kFormat));
  }
  Manifest manifest;
  manifest.jaxrec = fields.string("jaxrec");
  manifest.jax = fields.string("jax");
  manifest.batch = read_batch(fields.get("batch"));
  manifest.output_structure =
      read_structure(fields.get("output_structure"), "the structure of the outputs");
  for (const Json& value : fields.list("outputs")) {
    Fields of_output(value, "an output");
    manifest.outputs.push_back(read_array(of_output));
    of_output.finish();
  }
  for (const Json& value : fields.list("arrays")) {
    manifest.arrays.push_back(read_stored_array(value));
  }
  for (const Json& value : fields.list("programs")) {
    manifest.programs.push_back(read_program(value));
  }
  const Json& files = fields.get("files");
  if (!files.is_object()) throw Problem("'files' must be an object");
  for (const auto& [file, value] : files.items()) {
    Fields of_file(value, "file " + in_quotes(file));
    manifest.files[file] = {of_file.number("bytes", 0), of_file.strings("crc32")};
    of_file.finish();
  }
  fields.list("tables");
  manifest.has_encoder = fields.boolean("has_encoder");
  if (content.contains("encoding")) fields.get("encoding");
  if (fields.has("encoding")) manifest.encoding = read_column_encoding(fields.get("encoding"));
  fields.finish();
  check_files(manifest);
  check_batch(manifest.batch);
  check_counts(manifest);
  return manifest;
}

}  // namespace

size_t Structure::num_leaves() const {
  if (kind == Kind::kLeaf) return 1;
  size_t leaves = 0;
  for (const Structure& part : parts) leaves += part.num_leaves();
  return leaves;
}

int64_t ArraySpec::elements() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

size_t ArraySpec::bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }

int64_t Feature::bound() const { return num_ids.value_or(int64_t{1} << 31); }

const std::string& name_of(const InputSpec& input) {
  return std::visit([](const auto& each) -> const std::string& { return each.name; }, input);
}

Manifest parse_manifest(std::string_view text, bool with_checksum) {
  try {
    return read_manifest(parse_json(text), with_checksum);
  } catch (const std::invalid_argument& problem) {
    throw ArtifactError(problem.what());
  }
}

}  // namespace jaxrec::serving
