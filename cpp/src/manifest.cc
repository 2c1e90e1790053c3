#include "jaxrec/serving/manifest.h"

#include <zlib.h>

#include <algorithm>
#include <stdexcept>

#include "checksums.h"
#include "jaxrec/serving/error.h"
#include "json.h"
#include "read_batch_spec.h"
#include "read_column_encoding.h"
#include "read_ranker_spec.h"

namespace jaxrec::serving {
namespace {

constexpr std::string_view kFormat = "jaxrec model 1";

using Problem = std::invalid_argument;

StoredArray read_stored_array(const Json& value) {
  Fields fields(value, "an array");
  StoredArray array{fields.string("name"), fields.string("file"), read_dtype(fields),
                    fields.numbers("shape", 0)};
  fields.boolean("is_mapped");
  fields.finish();
  check_size(array.shape, array.name);
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
  if (manifest.ranker) {
    for (const RankerProgram& program : manifest.ranker->programs) {
      used.push_back(program.file);
      used.push_back(program.stablehlo);
    }
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

void check_counts(const Manifest& manifest) {
  const auto check = [](const Structure& structure, size_t listed, const std::string& what) {
    if (structure.num_leaves() != listed) {
      throw Problem("its structure has " + std::to_string(structure.num_leaves()) + " " + what +
                    ", and it lists " + std::to_string(listed));
    }
  };
  check(manifest.batch.structure, manifest.batch.inputs.size(), "inputs");
  check(manifest.output_structure, manifest.outputs.size(), "outputs");
  if (!manifest.ranker && manifest.batch.structure.kind != Structure::Kind::kTuple) {
    throw Problem("its inputs are not a tuple of arguments");
  }
  if (manifest.ranker && !manifest.programs.empty()) {
    throw Problem("it has programs beside those of its ranker");
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
  if (content.contains("no_encoding")) fields.get("no_encoding");
  if (fields.has("no_encoding")) manifest.no_encoding = fields.string("no_encoding");
  if (content.contains("ranker")) fields.get("ranker");
  if (fields.has("ranker")) {
    manifest.ranker = read_ranker_spec(fields.get("ranker"), manifest.batch);
  }
  fields.finish();
  check_files(manifest);
  check_counts(manifest);
  return manifest;
}

}  // namespace

Manifest parse_manifest(std::string_view text, bool with_checksum) {
  try {
    return read_manifest(parse_json(text), with_checksum);
  } catch (const std::invalid_argument& problem) {
    throw ArtifactError(problem.what());
  }
}

}  // namespace jaxrec::serving
