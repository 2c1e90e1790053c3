// The primitives as XLA calls them: buffers and attributes in, buffers out.
#include <algorithm>
#include <thread>
#include <vector>

#include "attention.h"
#include "dot_products.h"
#include "drop_ids.h"
#include "lookup.h"
#include "max_gradients.h"
#include "new_rows.h"
#include "operands.h"
#include "runs.h"
#include "shift.h"
#include "update_operands.h"
#include "update_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxrec {
namespace {

// A team of the threads that XLA runs the program with, but of no more than there are cores: the
// simulated devices of a test share one pool that is larger.
Team make_team(ffi::ThreadPool& pool) {
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const int threads = static_cast<int>(std::clamp<int64_t>(pool.num_threads(), 1, cores));
  return Team([&pool](std::function<void()> help) { pool.Schedule(std::move(help)); }, threads);
}

ffi::Error new_rows_call(ffi::ThreadPool pool, ffi::AnyBuffer row,
                         ffi::Result<ffi::AnyBuffer> out) {
  Checks checks;
  const Dimensions of_row = row.dimensions(), of_rows = out->dimensions();
  const bool is_fit = of_rows.size() == of_row.size() + 1 &&
                      are_equal({of_rows.begin() + 1, of_row.size()}, of_row);
  if (!is_fit) {
    checks.require(false, "the result has the shape ", shape_of(of_rows), ", not that of rows ",
                   shape_of(of_row));
  }
  const ffi::DataType type = row.element_type();
  checks.require(type == out->element_type(), "`row` is ", type, ", the result ",
                 out->element_type());
  checks.require(has_whole_bytes(type), "`row` is ", type, ", of less than a byte");
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  new_rows(team, row.untyped_data(), row.size_bytes(), of_rows[0], out->untyped_data());
  return ffi::Error::Success();
}

ffi::Error pooled_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                              ffi::RemainingArgs table, ffi::RemainingRets results,
                              Numbers layout) {
  Checks checks;
  Parts from(checks, "table"), out(checks, "result");
  if (!from.add(table, table.size()) || !from.is_table() || !out.add(results)) {
    return checks.error();
  }
  const Batch batch = read_batch(checks, ids, lengths, &weights, layout, from.num_rows());
  if (!fills(checks, batch, out.rows()) || !out.has_shape(out.num_rows(), from.dim())) {
    return checks.error();
  }
  Team team = make_team(pool);
  const Rows rows = from.rows();
  pooled_lookup(team, {&rows, 0, from.type(), from.num_rows(), from.dim()}, batch, out.rows(),
                out.type());
  return ffi::Error::Success();
}

ffi::Error flatten_bags_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                             ffi::Result<Ints> rows, ffi::Result<Ints> bags,
                             ffi::Result<Floats> scales, Numbers layout, int64_t num_rows) {
  Checks checks;
  if (!checks.in_range("num_rows", num_rows, 0, kMostRows)) return checks.error();
  const Batch batch = read_batch(checks, ids, lengths, &weights, layout, num_rows);
  int64_t positions = 0;
  bool has_scales = batch.weights != nullptr;
  for (const Feature& feature : batch.features) {
    positions += feature.capacity;
    has_scales |= feature.mean;
  }
  checks.has_length("rows", *rows, positions);
  checks.has_length("bags", *bags, positions);
  checks.has_length("scales", *scales, positions, !has_scales);
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  flatten_bags(team, num_rows, batch, rows->typed_data(), bags->typed_data(), given(*scales));
  return ffi::Error::Success();
}

ffi::Error row_lookup_call(ffi::ThreadPool pool, Ints rows, ffi::RemainingArgs table,
                           ffi::RemainingRets results) {
  Checks checks;
  Parts from(checks, "table"), out(checks, "result");
  if (!checks.is_list("rows", rows) || !from.add(table, table.size()) || !from.is_table() ||
      !out.add(results) || !out.has_type(from.type()) ||
      !out.has_shape(rows.dimensions()[0], from.dim())) {
    return checks.error();
  }
  Team team = make_team(pool);
  const Rows source = from.rows();
  row_lookup(team, {&source, 0, from.type(), from.num_rows(), from.dim()}, rows.typed_data(),
             rows.element_count(), out.rows());
  return ffi::Error::Success();
}

ffi::Error packed_pooled_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                                     Bytes packed, ffi::Result<ffi::AnyBuffer> result,
                                     Numbers layout, int32_t code) {
  Checks checks;
  Parts out(checks, "result");
  if (!out.add(*result) || !out.has_columns()) return checks.error();
  const PackedTable table = read_packed(checks, packed, code, out.dim());
  const Batch batch = read_batch(checks, ids, lengths, &weights, layout, table.num_rows);
  if (!fills(checks, batch, out.rows())) return checks.error();
  Team team = make_team(pool);
  packed_pooled_lookup(team, table, batch, result->untyped_data(), out.type());
  return ffi::Error::Success();
}

// The winners of an output, or none.
bool are_winners(Checks& checks, const Positions& winners, int64_t num_bags, int64_t dim) {
  const int64_t wanted[] = {num_bags, dim}, none[] = {0, dim};
  const Dimensions dimensions = winners.dimensions();
  return checks.require(are_equal(dimensions, {wanted, 2}) || are_equal(dimensions, {none, 2}),
                        "`winners` has the shape ", shape_of(dimensions), ", not ",
                        shape_of({wanted, 2}), " or ", shape_of({none, 2}));
}

ffi::Error max_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, ffi::RemainingArgs table,
                           ffi::Result<ffi::AnyBuffer> result, ffi::Result<Positions> winners,
                           Numbers layout) {
  Checks checks;
  Parts from(checks, "table"), out(checks, "result");
  if (!from.add(table, table.size()) || !from.is_table() || !out.add(*result)) {
    return checks.error();
  }
  const Batch batch = read_batch(checks, ids, lengths, nullptr, layout, from.num_rows());
  if (!fills(checks, batch, out.rows()) || !out.has_shape(out.num_rows(), from.dim()) ||
      !are_winners(checks, *winners, out.num_rows(), out.dim())) {
    return checks.error();
  }
  Team team = make_team(pool);
  const Rows rows = from.rows();
  max_lookup(team, {&rows, 0, from.type(), from.num_rows(), from.dim()}, batch,
             result->untyped_data(), out.type(), given(*winners));
  return ffi::Error::Success();
}

ffi::Error packed_max_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Bytes packed,
                                  ffi::Result<ffi::AnyBuffer> result,
                                  ffi::Result<Positions> winners, Numbers layout, int32_t code) {
  Checks checks;
  Parts out(checks, "result");
  if (!out.add(*result) || !out.has_columns()) return checks.error();
  const PackedTable table = read_packed(checks, packed, code, out.dim());
  const Batch batch = read_batch(checks, ids, lengths, nullptr, layout, table.num_rows);
  if (!fills(checks, batch, out.rows()) ||
      !are_winners(checks, *winners, out.num_rows(), out.dim())) {
    return checks.error();
  }
  Team team = make_team(pool);
  packed_max_lookup(team, table, batch, result->untyped_data(), out.type(), given(*winners));
  return ffi::Error::Success();
}

ffi::Error max_gradients_call(ffi::ThreadPool pool, Positions winners, BagFloats gradients, Ints bags,
                              ffi::Result<BagFloats> out) {
  Checks checks;
  const Dimensions of_bags = winners.dimensions(), of_out = out->dimensions();
  if (!are_equal(of_bags, gradients.dimensions()) || of_out[1] != of_bags[1]) {
    checks.require(false, "`winners` has the shape ", shape_of(of_bags), ", the gradients ",
                   shape_of(gradients.dimensions()), ", the result ", shape_of(of_out));
    return checks.error();
  }
  checks.has_length("bags", bags, of_out[0]);
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  max_gradients(team, winners.typed_data(), gradients.typed_data(), of_bags[0], of_bags[1],
                bags.typed_data(), out->typed_data(), of_out[0]);
  return ffi::Error::Success();
}

// Five numbers a feature: where it lies in the batch, as in `layout`, and the id to drop.
ffi::Error drop_ids_call(ffi::ThreadPool pool, Ints ids, Ints lengths, ffi::Result<Ints> new_ids,
                         ffi::Result<Ints> new_lengths, ffi::Result<Ints> sources,
                         Numbers features) {
  Checks checks;
  if (!checks.is_list("ids", ids) || !checks.is_list("lengths", lengths)) return checks.error();
  const int64_t num_ids = ids.dimensions()[0], num_lengths = lengths.dimensions()[0];
  checks.has_length("new ids", *new_ids, num_ids);
  checks.has_length("new lengths", *new_lengths, num_lengths);
  checks.has_length("sources", *sources, num_ids);
  checks.require(features.size() % 5 == 0, "`features` has ", features.size(),
                 " numbers, not five for each feature");
  std::vector<DroppingFeature> dropping;
  int64_t id_end = 0, length_end = 0;
  for (size_t i = 0; i < features.size() && checks.passed(); i += 5) {
    const int64_t* n = features.begin() + i;
    for (int k = 0; k < 5; ++k) checks.in_range("features", n[k], 0, kMostRows);
    // Threads write the features, so no two may share a position.
    checks.require(id_end <= n[0] && n[0] + n[1] <= num_ids, "feature ", i / 5,
                   " in `features` has ids ", n[0], " to ", n[0] + n[1], " of ", num_ids);
    checks.require(length_end <= n[2] && n[2] + n[3] <= num_lengths, "feature ", i / 5,
                   " in `features` has lengths ", n[2], " to ", n[2] + n[3], " of ", num_lengths);
    id_end = n[0] + n[1];
    length_end = n[2] + n[3];
    dropping.push_back({n[0], n[1], n[2], n[3], static_cast<int32_t>(n[4])});
  }
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  drop_ids(team, ids.typed_data(), num_ids, lengths.typed_data(), num_lengths, dropping,
           new_ids->typed_data(), new_lengths->typed_data(), sources->typed_data());
  return ffi::Error::Success();
}

ffi::Error packed_row_lookup_call(ffi::ThreadPool pool, Ints rows, Bytes packed,
                                  ffi::Result<ffi::AnyBuffer> result, int32_t code) {
  Checks checks;
  Parts out(checks, "result");
  if (!checks.is_list("rows", rows) || !out.add(*result) || !out.has_columns() ||
      !out.has_shape(rows.dimensions()[0], out.dim())) {
    return checks.error();
  }
  const PackedTable table = read_packed(checks, packed, code, out.dim());
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  packed_row_lookup(team, table, rows.typed_data(), rows.element_count(), result->untyped_data(),
                    out.type());
  return ffi::Error::Success();
}

ffi::Error build_runs_call(ffi::ThreadPool pool, Ints rows, ffi::Result<Ints> order,
                           ffi::Result<Ints> segments, ffi::Result<Ints> unique,
                           ffi::Result<Ints> inverse, int64_t num_rows) {
  Checks checks;
  if (!checks.is_list("rows", rows)) return checks.error();
  const int64_t count = rows.dimensions()[0];
  checks.in_range("num_rows", num_rows, 0, kMostRows);
  checks.has_length("order", *order, count);
  checks.has_length("segments", *segments, count);
  checks.has_length("unique", *unique, count);
  checks.has_length("inverse", *inverse, count);
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  build_runs(team, rows.typed_data(), count, num_rows, order->typed_data(), segments->typed_data(),
             unique->typed_data(), inverse->typed_data());
  return ffi::Error::Success();
}

ffi::Error bucket_call(ffi::ThreadPool pool, Ints owners, ffi::Result<Ints> order,
                       ffi::Result<Ints> counts) {
  Checks checks;
  if (!checks.is_list("owners", owners) || !checks.is_list("counts", *counts) ||
      !checks.has_length("order", *order, owners.dimensions()[0])) {
    return checks.error();
  }
  Team team = make_team(pool);
  bucket(team, owners.typed_data(), owners.element_count(), counts->element_count(),
         order->typed_data(), counts->typed_data());
  return ffi::Error::Success();
}

ffi::Error shift_rows_call(ffi::ThreadPool pool, Ints rows, ffi::Result<Ints> out, Numbers starts,
                           Numbers shifts, int64_t num_rows, int64_t outside) {
  Checks checks;
  if (!checks.is_list("rows", rows)) return checks.error();
  checks.has_length("result", *out, rows.dimensions()[0]);
  checks.in_range("num_rows", num_rows, 0, kMostRows);
  checks.in_range("outside", outside, -kMostRows - 1, kMostRows);
  checks.require(starts.size() == shifts.size(), "`starts` has ", starts.size(),
                 " elements, `shifts` ", shifts.size());
  checks.require(starts.size() > 0 || num_rows == 0, "`starts` has no elements");
  int64_t before = 0;
  for (size_t i = 0; i < starts.size() && checks.passed(); ++i) {
    checks.in_range("starts", starts[i], before, i == 0 ? 0 : kMostRows);
    checks.in_range("shifts", shifts[i], -kMostRows - 1, kMostRows);
    before = starts[i];
  }
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  shift_rows(team, rows.typed_data(), rows.element_count(), starts.begin(), shifts.begin(),
             static_cast<int64_t>(starts.size()), num_rows, static_cast<int32_t>(outside),
             out->typed_data());
  return ffi::Error::Success();
}

ffi::Error sum_rows_call(ffi::ThreadPool pool, Ints rows, Ints bags, Floats scales,
                         ffi::AnyBuffer gradients, ffi::RemainingRets results, float bound) {
  Checks checks;
  Parts from(checks, "gradients"), out(checks, "result");
  if (!from.add(gradients) || !out.add(results) || !out.has_type(Type::kF32) ||
      !out.has_shape(out.num_rows(), from.dim()) ||
      !are_lookups(checks, rows, bags, scales, from.num_rows())) {
    return checks.error();
  }
  if (from.dim() == 0) return ffi::Error::Success();
  Team team = make_team(pool);
  const Rows source = from.rows();
  sum_rows(team, out.rows(), out.num_rows(), rows.typed_data(), rows.element_count(),
           {&source, from.type(), from.dim(), given(bags), from.num_rows(), given(scales), bound});
  return ffi::Error::Success();
}

// Operands: rows, bags (or none), scales (or none), [rate, share1, share2], number of the step;
// then the parts of the gradients, and the table and its state, which are the results too, in the
// same memory.
ffi::Error fused_update_call(ffi::ThreadPool pool, Ints rows, Ints bags, Floats scales,
                             Floats rates, Ints number, ffi::RemainingArgs operands,
                             ffi::Result<ffi::AnyBuffer> table,
                             ffi::RemainingRets state, ffi::Dictionary attributes) {
  StepReader reader(attributes);
  Step step = read_step(reader);
  const float bound = reader.get<float>("bound");
  const int64_t num_parts = reader.get<int64_t>("parts");
  Checks checks;
  checks.require(reader.error);
  checks.in_range("rule", static_cast<int64_t>(step.rule), 0,
                  static_cast<int64_t>(Rule::kPartialRowwiseAdam));
  checks.in_range("decay", static_cast<int64_t>(step.decay), 0,
                  static_cast<int64_t>(Decay::kDecoupled));
  checks.require(!step.counts_rows || step.rule == Rule::kAdam,
                 "`counts_rows` is set for a rule other than Adam");
  const int64_t num_operands = static_cast<int64_t>(operands.size());
  const int64_t num_arrays = 1 + static_cast<int64_t>(state.size());
  checks.require(num_parts >= 1 && num_operands - num_arrays == num_parts, "there are ",
                 num_operands, " operands, not ", num_parts, " parts of gradients and ", num_arrays,
                 " arrays of the table");
  checks.has_length("rates", rates, 3);
  checks.require(number.element_count() == 1, "the number of the step has ",
                 number.element_count(), " elements, not 1");
  if (!checks.passed()) return checks.error();

  Parts gradients(checks, "gradients"), to(checks, "table");
  if (!to.add(*table) || !to.is_table() ||
      !is_in_place(checks, operands, num_parts, to.first_part()) ||
      !gradients.add(operands, num_parts) || !gradients.has_shape(gradients.num_rows(), to.dim()) ||
      !are_lookups(checks, rows, bags, scales, gradients.num_rows())) {
    return checks.error();
  }
  const std::vector<int64_t> sizes = state_sizes(step, to.num_rows(), to.dim());
  checks.require(sizes.size() == state.size(), "there are ", state.size(),
                 " arrays of state; the rule has ", sizes.size());
  if (!checks.passed()) return checks.error();
  float** places[] = {&step.first, &step.second, &step.counts};
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto array = state.get<Floats>(i);
    if (!array.has_value()) return array.error();
    const int64_t size = static_cast<int64_t>((*array)->element_count());
    checks.require(size == sizes[i], "array ", i, " of the state has ", size, " elements, not ",
                   sizes[i]);
    if (!is_in_place(checks, operands, num_parts + 1 + i, (*array)->typed_data())) {
      return checks.error();
    }
    *places[i] = (*array)->typed_data();
  }
  step.rate = rates.typed_data()[0];
  step.share1 = rates.typed_data()[1];
  step.share2 = rates.typed_data()[2];
  step.step = static_cast<uint32_t>(*number.typed_data());
  Team team = make_team(pool);
  const Rows source = gradients.rows();
  fused_update(team, {to.first_part(), to.type(), to.num_rows(), to.dim()}, step, rows.typed_data(),
               rows.element_count(),
               {&source, gradients.type(), gradients.dim(), given(bags), gradients.num_rows(),
                given(scales), bound});
  return ffi::Error::Success();
}

// `[..., num_vectors, dim]`: all dimensions before are samples.
Vectors read_vectors(Checks& checks, const Floats& vectors) {
  const Dimensions dimensions = vectors.dimensions();
  const size_t rank = dimensions.size();
  if (rank < 2 || dimensions[rank - 2] > kMostRows) {
    checks.require(false, "`vectors` has the shape ", shape_of(dimensions), ", not [..., n, dim]");
    return {};
  }
  int64_t samples = 1;
  for (size_t i = 0; i + 2 < rank; ++i) samples *= dimensions[i];
  return {vectors.typed_data(), samples, dimensions[rank - 2], dimensions[rank - 1]};
}

// The products of the pairs of vectors `[..., n, dim]` are `[..., n * (n - 1) / 2]`.
bool are_products(Checks& checks, const Floats& vectors, const Vectors& of,
                  const Floats& products) {
  if (!checks.passed()) return false;
  const Dimensions dimensions = vectors.dimensions(), given = products.dimensions();
  const size_t before = dimensions.size() - 2;
  if (given.size() != before + 1 || given[before] != of.num_pairs() ||
      !are_equal({given.begin(), before}, {dimensions.begin(), before})) {
    checks.require(false, "the products have the shape ", shape_of(given), ", the vectors ",
                   shape_of(dimensions), "; there are ", of.num_pairs(), " pairs");
  }
  return checks.passed();
}

ffi::Error pair_products_call(ffi::ThreadPool pool, Floats vectors, ffi::Result<Floats> products) {
  Checks checks;
  const Vectors of = read_vectors(checks, vectors);
  if (!are_products(checks, vectors, of, *products)) return checks.error();
  if (products->element_count() == 0) return ffi::Error::Success();
  Team team = make_team(pool);
  pair_products(team, of, products->typed_data());
  return ffi::Error::Success();
}

ffi::Error pair_gradients_call(ffi::ThreadPool pool, Floats vectors, Floats gradient,
                               ffi::Result<Floats> out) {
  Checks checks;
  const Vectors of = read_vectors(checks, vectors);
  if (!are_products(checks, vectors, of, gradient)) return checks.error();
  if (!are_equal(out->dimensions(), vectors.dimensions())) {
    checks.require(false, "the result has the shape ", shape_of(out->dimensions()),
                   ", the vectors ", shape_of(vectors.dimensions()));
    return checks.error();
  }
  if (out->element_count() == 0) return ffi::Error::Success();
  Team team = make_team(pool);
  pair_gradients(team, of, gradient.typed_data(), out->typed_data());
  return ffi::Error::Success();
}

using Heads = ffi::Buffer<ffi::F32, 3>;  // [elements, heads, columns]

bool has_shape(Checks& checks, const char* name, const Heads& array, int64_t elements,
               int64_t heads, int64_t columns) {
  const int64_t wanted[] = {elements, heads, columns};
  const Dimensions dimensions = array.dimensions();
  return checks.require(are_equal(dimensions, {wanted, 3}), "`", name, "` has the shape ",
                        shape_of(dimensions), ", not ", shape_of({wanted, 3}));
}

// Ranges are [3 or 4, queries] and offsets [2, rows + 1].
Attention read_attention(Checks& checks, const Heads& query, const Heads& key, const Heads& value,
                         const Ints& ranges, const Ints& offsets, const Floats& bias, float alpha) {
  const Dimensions of_query = query.dimensions(), of_value = value.dimensions();
  const int64_t queries = of_query[0], heads = of_query[1], dim = of_query[2], keys = of_value[0];
  checks.require(queries <= kMostRows && keys <= kMostRows, "there are more than ", kMostRows,
                 " queries or keys");
  checks.require(dim <= kMaxDim && of_value[2] <= kMaxDim, "vectors have more than ", kMaxDim,
                 " columns");
  has_shape(checks, "key", key, keys, heads, dim);
  has_shape(checks, "value", value, keys, heads, of_value[2]);
  const Dimensions of_ranges = ranges.dimensions(), of_offsets = offsets.dimensions();
  checks.require(of_ranges.size() == 2 && (of_ranges[0] == 3 || of_ranges[0] == 4) &&
                     of_ranges[1] == queries,
                 "`ranges` has the shape ", shape_of(of_ranges), ", not [3 or 4, ", queries, "]");
  checks.require(of_offsets.size() == 2 && of_offsets[0] == 2 && of_offsets[1] > 0,
                 "`offsets` has the shape ", shape_of(of_offsets), ", not [2, rows + 1]");
  const Dimensions of_bias = bias.dimensions();
  checks.require(of_bias.size() == 2 && (of_bias[0] == 0 || of_bias[1] == heads),
                 "`bias` has the shape ", shape_of(of_bias), ", not [distances, ", heads, "]");
  if (!checks.passed()) return {};
  const int32_t* range = ranges.typed_data();
  const int32_t* group = of_ranges[0] == 4 ? range + 3 * queries : nullptr;
  const int64_t rows = of_offsets[1] - 1;
  return {query.typed_data(), key.typed_data(), value.typed_data(), queries, keys, heads, dim,
          of_value[2], {range, range + queries, range + 2 * queries, group}, offsets.typed_data(),
          offsets.typed_data() + rows + 1, rows, given(bias), of_bias[0], alpha};
}

ffi::Error attention_call(ffi::ThreadPool pool, Heads query, Heads key, Heads value, Ints ranges,
                          Ints offsets, Floats bias, ffi::Result<Heads> out, float alpha) {
  Checks checks;
  const Attention of =
      read_attention(checks, query, key, value, ranges, offsets, bias, alpha);
  if (!checks.passed()) return checks.error();
  has_shape(checks, "the result", *out, of.num_queries, of.heads, of.value_dim);
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  attend(team, of, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error attention_gradients_call(ffi::ThreadPool pool, Heads query, Heads key, Heads value,
                                    Ints ranges, Ints offsets, Floats bias, Heads gradient,
                                    ffi::Result<Heads> of_query, ffi::Result<Heads> of_key,
                                    ffi::Result<Heads> of_value, ffi::Result<Floats> of_bias,
                                    float alpha) {
  Checks checks;
  const Attention of =
      read_attention(checks, query, key, value, ranges, offsets, bias, alpha);
  if (!checks.passed()) return checks.error();
  has_shape(checks, "gradient", gradient, of.num_queries, of.heads, of.value_dim);
  has_shape(checks, "the queries' gradient", *of_query, of.num_queries, of.heads, of.dim);
  has_shape(checks, "the keys' gradient", *of_key, of.num_keys, of.heads, of.dim);
  has_shape(checks, "the values' gradient", *of_value, of.num_keys, of.heads, of.value_dim);
  checks.require(are_equal(of_bias->dimensions(), bias.dimensions()),
                 "the bias's gradient has the shape ", shape_of(of_bias->dimensions()), ", not ",
                 shape_of(bias.dimensions()));
  if (!checks.passed()) return checks.error();
  Team team = make_team(pool);
  attend_gradients(team, of, {gradient.typed_data(), of_query->typed_data(), of_key->typed_data(),
                              of_value->typed_data(), of_bias->typed_data()});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxrec

#define JAXREC_VISIBLE __attribute__((visibility("default")))

#define JAXREC_EXPORT(name, function, ...)                                   \
  extern "C" JAXREC_VISIBLE XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {  \
    XLA_FFI_DEFINE_HANDLER(handler, function, __VA_ARGS__);                  \
    return jaxrec::with_name(#name, frame->api, handler(frame));             \
  }                                                                          \
  static_assert(true, "a semicolon follows")

JAXREC_EXPORT(jaxrec_new_rows, jaxrec::new_rows_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<ffi::AnyBuffer>()
                  .Ret<ffi::AnyBuffer>());

JAXREC_EXPORT(jaxrec_pooled_lookup, jaxrec::pooled_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<jaxrec::Numbers>("layout"));

JAXREC_EXPORT(jaxrec_flatten_bags, jaxrec::flatten_bags_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Floats>()
                  .Attr<jaxrec::Numbers>("layout")
                  .Attr<int64_t>("num_rows"));

JAXREC_EXPORT(jaxrec_row_lookup, jaxrec::row_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .RemainingArgs()
                  .RemainingRets());

JAXREC_EXPORT(jaxrec_packed_pooled_lookup, jaxrec::packed_pooled_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Arg<jaxrec::Bytes>()
                  .Ret<ffi::AnyBuffer>()
                  .Attr<jaxrec::Numbers>("layout")
                  .Attr<int32_t>("code"));

JAXREC_EXPORT(jaxrec_packed_row_lookup, jaxrec::packed_row_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Bytes>()
                  .Ret<ffi::AnyBuffer>()
                  .Attr<int32_t>("code"));

JAXREC_EXPORT(jaxrec_max_lookup, jaxrec::max_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .RemainingArgs()
                  .Ret<ffi::AnyBuffer>()
                  .Ret<jaxrec::Positions>()
                  .Attr<jaxrec::Numbers>("layout"));

JAXREC_EXPORT(jaxrec_packed_max_lookup, jaxrec::packed_max_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Bytes>()
                  .Ret<ffi::AnyBuffer>()
                  .Ret<jaxrec::Positions>()
                  .Attr<jaxrec::Numbers>("layout")
                  .Attr<int32_t>("code"));

JAXREC_EXPORT(jaxrec_max_gradients, jaxrec::max_gradients_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Positions>()
                  .Arg<jaxrec::BagFloats>()
                  .Arg<jaxrec::Ints>()
                  .Ret<jaxrec::BagFloats>());

JAXREC_EXPORT(jaxrec_drop_ids, jaxrec::drop_ids_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Attr<jaxrec::Numbers>("features"));

JAXREC_EXPORT(jaxrec_build_runs, jaxrec::build_runs_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Attr<int64_t>("num_rows"));

JAXREC_EXPORT(jaxrec_bucket, jaxrec::bucket_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>());

JAXREC_EXPORT(jaxrec_shift_rows, jaxrec::shift_rows_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Ret<jaxrec::Ints>()
                  .Attr<jaxrec::Numbers>("starts")
                  .Attr<jaxrec::Numbers>("shifts")
                  .Attr<int64_t>("num_rows")
                  .Attr<int64_t>("outside"));

JAXREC_EXPORT(jaxrec_sum_rows, jaxrec::sum_rows_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Arg<ffi::AnyBuffer>()
                  .RemainingRets()
                  .Attr<float>("bound"));

JAXREC_EXPORT(jaxrec_fused_update, jaxrec::fused_update_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Arg<jaxrec::Floats>()
                  .Arg<jaxrec::Ints>()
                  .RemainingArgs()
                  .Ret<ffi::AnyBuffer>()
                  .RemainingRets()
                  .Attrs());

JAXREC_EXPORT(jaxrec_pair_products, jaxrec::pair_products_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Floats>()
                  .Ret<jaxrec::Floats>());

JAXREC_EXPORT(jaxrec_pair_gradients, jaxrec::pair_gradients_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Floats>()
                  .Arg<jaxrec::Floats>()
                  .Ret<jaxrec::Floats>());

JAXREC_EXPORT(jaxrec_attention, jaxrec::attention_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Ret<jaxrec::Heads>()
                  .Attr<float>("alpha"));

JAXREC_EXPORT(jaxrec_attention_gradients, jaxrec::attention_gradients_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Heads>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Ints>()
                  .Arg<jaxrec::Floats>()
                  .Arg<jaxrec::Heads>()
                  .Ret<jaxrec::Heads>()
                  .Ret<jaxrec::Heads>()
                  .Ret<jaxrec::Heads>()
                  .Ret<jaxrec::Floats>()
                  .Attr<float>("alpha"));

extern "C" {

JAXREC_VISIBLE const char* jaxrec_instruction_set() { return jaxrec::kernels().name; }

JAXREC_VISIBLE int jaxrec_select(const char* name) { return jaxrec::select_kernels(name); }

// The version of jaxlib whose headers were used: the oldest that the library runs on.
JAXREC_VISIBLE const char* jaxrec_jaxlib() { return JAXREC_JAXLIB; }

}  // extern "C"
