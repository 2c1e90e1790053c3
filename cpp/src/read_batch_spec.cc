#include "read_batch_spec.h"

#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

namespace jaxrec::serving {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 46;  // of an array
constexpr int64_t kMostBatch = (int64_t{1} << 31) - 1;

using Problem = std::invalid_argument;

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
        check_size(shape, array->name);
      }
    }
  }
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

void check_size(const std::vector<int64_t>& shape, const std::string& name) {
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size == 0) return;
    if (elements > kMostElements / size) throw Problem(name + " is too large");
    elements *= size;
  }
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
  check_size(array.shape, array.name);
  return array;
}

BatchSpec read_batch(const Json& value) {
  Fields fields(value, "the batch");
  BatchSpec batch;
  batch.structure = read_structure(fields.get("structure"), "the structure of the inputs");
  for (const Json& input : fields.list("inputs")) batch.inputs.push_back(read_input(input));
  for (const Json& size : fields.list("sizes")) batch.sizes.push_back(read_size(size));
  fields.finish();
  check_batch(batch);
  return batch;
}

}  // namespace jaxrec::serving
