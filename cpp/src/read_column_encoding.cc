#include "read_column_encoding.h"

#include <initializer_list>
#include <limits>
#include <set>
#include <stdexcept>
#include <utility>

namespace jaxrec::serving {
namespace {

constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;

// Returns the value of the name that a field holds.
template <class Value>
Value choice(Fields& fields, const std::string& field,
             std::initializer_list<std::pair<const char*, Value>> choices) {
  const std::string name = fields.string(field);
  for (const auto& [known, value] : choices) {
    if (name == known) return value;
  }
  throw std::invalid_argument(fields.place() + ": " + in_quotes(field) + " is " + in_quotes(name) +
                              ", which this version does not know");
}

// A field that columns of other values lack.
bool read_is_boolean(Fields& fields) {
  return fields.has("is_boolean") && fields.boolean("is_boolean");
}

std::optional<TimePart> read_part(Fields& fields) {
  if (!fields.has("part")) return std::nullopt;
  return choice<TimePart>(fields, "part",
                          {{"age", TimePart::kAge},
                           {"hour", TimePart::kHour},
                           {"weekday", TimePart::kWeekday},
                           {"month", TimePart::kMonth}});
}

DenseColumn read_dense(const Json& value) {
  using Transform = DenseColumn::Transform;
  using Missing = DenseColumn::Missing;
  Fields fields(value, "a dense column");
  DenseColumn column;
  column.name = fields.string("name");
  column.transform = choice<Transform>(fields, "transform",
                                       {{"standardize", Transform::kStandardize},
                                        {"log1p", Transform::kLog1p},
                                        {"log_standardize", Transform::kLogStandardize},
                                        {"log_counts", Transform::kLogCounts},
                                        {"none", Transform::kNone}});
  column.missing = choice<Missing>(
      fields, "missing",
      {{"mean", Missing::kMean}, {"zero", Missing::kZero}, {"error", Missing::kError}});
  column.is_boolean = read_is_boolean(fields);
  if (fields.has("width")) column.width = fields.number("width", 1, kMostRows);
  column.part = read_part(fields);
  if (fields.has("since")) column.since = fields.string("since");
  if (fields.has("origin")) {
    column.origin = fields.number("origin", std::numeric_limits<int64_t>::min());
  }
  fields.finish();
  return column;
}

VocabularyFiles read_vocabulary(const Json& value) {
  Fields fields(value, "a vocabulary");
  VocabularyFiles vocabulary;
  vocabulary.is_integer = fields.boolean("is_integer");
  vocabulary.num_unknown = fields.number("num_unknown", 0, kMostRows);
  vocabulary.seed = static_cast<uint64_t>(fields.number("seed", 0));
  vocabulary.hashes = fields.string("hashes");
  vocabulary.places = fields.string("places");
  vocabulary.values = fields.string("values");
  fields.get("offsets");
  if (fields.has("offsets")) vocabulary.offsets = fields.string("offsets");
  fields.finish();
  if (vocabulary.offsets.has_value() == vocabulary.is_integer) {
    throw std::invalid_argument("a vocabulary of strings has offsets, and one of integers none");
  }
  return vocabulary;
}

CategoricalColumn read_categorical(const Json& value) {
  using Encoding = CategoricalColumn::Encoding;
  Fields fields(value, "a categorical column");
  CategoricalColumn column;
  column.name = fields.string("name");
  column.encoding = choice<Encoding>(fields, "encoding",
                                     {{"vocabulary", Encoding::kVocabulary},
                                      {"hash", Encoding::kHash},
                                      {"ids", Encoding::kIds},
                                      {"modulo", Encoding::kModulo},
                                      {"frozen", Encoding::kFrozen}});
  column.num_embeddings = fields.number("num_embeddings", 1, kMostRows);
  column.refuses_null = fields.boolean("refuses_null");
  column.is_list = fields.boolean("is_list");
  fields.get("vocabulary");
  if (fields.has("vocabulary")) column.vocabulary = read_vocabulary(fields.get("vocabulary"));
  if (fields.has("ids")) column.ids = fields.string("ids");
  column.is_boolean = read_is_boolean(fields);
  if (fields.has("is_text")) column.is_text = fields.boolean("is_text");
  column.part = read_part(fields);
  fields.finish();
  if (column.part == TimePart::kAge) {
    throw std::invalid_argument("column " + in_quotes(column.name) + " has ages for categories");
  }
  if (column.ids.has_value() != (column.encoding == Encoding::kFrozen)) {
    throw std::invalid_argument("column " + in_quotes(column.name) +
                                " has frozen ids and another encoding, or the reverse");
  }
  if (column.vocabulary.has_value() != (column.encoding == Encoding::kVocabulary)) {
    throw std::invalid_argument("column " + in_quotes(column.name) +
                                " has a vocabulary and another encoding, or the reverse");
  }
  return column;
}

}  // namespace

std::string time_of(const std::string& feature) {
  return feature.substr(0, feature.find_last_of('.'));
}

std::vector<std::string> ColumnEncoding::files() const {
  std::vector<std::string> files = {moments};
  for (const CategoricalColumn& column : categorical) {
    if (column.ids) files.push_back(*column.ids);
    if (!column.vocabulary) continue;
    const VocabularyFiles& each = *column.vocabulary;
    files.insert(files.end(), {each.hashes, each.places, each.values});
    if (each.offsets) files.push_back(*each.offsets);
  }
  return files;
}

ColumnEncoding read_column_encoding(const Json& value) {
  Fields fields(value, "the encoding of columns");
  ColumnEncoding encoding;
  for (const Json& column : fields.list("dense")) encoding.dense.push_back(read_dense(column));
  for (const Json& column : fields.list("categorical")) {
    encoding.categorical.push_back(read_categorical(column));
  }
  encoding.moments = fields.string("moments");
  fields.finish();
  std::set<std::string> names;
  for (const DenseColumn& column : encoding.dense) names.insert(column.name);
  for (const CategoricalColumn& column : encoding.categorical) names.insert(column.name);
  if (names.size() != encoding.dense.size() + encoding.categorical.size()) {
    throw std::invalid_argument("two columns of the encoding have one name");
  }
  return encoding;
}

}  // namespace jaxrec::serving
