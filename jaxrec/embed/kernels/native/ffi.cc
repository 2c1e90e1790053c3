// The primitives as XLA calls them: buffers and attributes in, buffers out.
#include <algorithm>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

#include "dot_products.h"
#include "lookup.h"
#include "new_rows.h"
#include "runs.h"
#include "shift.h"
#include "update_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxrec {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Numbers = ffi::Span<const int64_t>;

// A team of the threads that XLA runs the program with, but of no more than there are cores: the
// simulated devices of a test share one pool that is larger.
Team make_team(ffi::ThreadPool& pool) {
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const int threads = static_cast<int>(std::clamp<int64_t>(pool.num_threads(), 1, cores));
  return Team([&pool](std::function<void()> help) { pool.Schedule(std::move(help)); }, threads);
}

// The Python side asks for the types that it knows to be among these.
Type type_of(ffi::DataType type) {
  return type == ffi::F32 ? Type::kF32 : type == ffi::BF16 ? Type::kBF16 : Type::kF16;
}

Table table_of(void* data, ffi::DataType type, ffi::Span<const int64_t> dimensions) {
  return {data, type_of(type), dimensions[0], dimensions[1]};
}

// Operands or results that are rows of one array, in one part or in equal parts.
class Parts {
 public:
  void add(void* rows, ffi::DataType type, ffi::Span<const int64_t> dimensions) {
    places_.push_back(rows);
    type_ = type_of(type);
    part_rows_ = dimensions[0];
    dim_ = dimensions[1];
  }
  // Some of the remaining operands.
  ffi::Error add(ffi::RemainingArgs operands, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      auto part = operands.get<ffi::AnyBuffer>(i);
      if (!part.has_value()) return part.error();
      add(part->untyped_data(), part->element_type(), part->dimensions());
    }
    return ffi::Error::Success();
  }
  // All remaining results.
  ffi::Error add(ffi::RemainingRets results) {
    for (size_t i = 0; i < results.size(); ++i) {
      auto part = results.get<ffi::AnyBuffer>(i);
      if (!part.has_value()) return part.error();
      add((*part)->untyped_data(), (*part)->element_type(), (*part)->dimensions());
    }
    return ffi::Error::Success();
  }

  Rows rows() const {
    return {places_.data(), static_cast<int64_t>(places_.size()), part_rows_};
  }
  Type type() const { return type_; }
  int64_t num_rows() const { return part_rows_ * static_cast<int64_t>(places_.size()); }
  int64_t dim() const { return dim_; }

 private:
  std::vector<void*> places_;
  Type type_ = Type::kF32;
  int64_t part_rows_ = 0, dim_ = 0;
};

// An operand that is not given has no elements.
template <class Buffer>
auto given(Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

// Nine numbers a feature: BagLayout's fields in base.py, then where its bags lie in the output.
std::vector<Feature> read_layout(Numbers numbers) {
  std::vector<Feature> features;
  int64_t position = 0;
  for (const int64_t* n = numbers.begin(); n != numbers.end(); n += 9) {
    features.push_back({n[0], n[1], n[2], n[3], n[4], n[5], n[6] != 0, position, n[7], n[8]});
    position += n[1];
  }
  return features;
}

ffi::Error new_rows_call(ffi::ThreadPool pool, ffi::AnyBuffer row, ffi::Result<ffi::AnyBuffer> out) {
  Team team = make_team(pool);
  new_rows(team, row.untyped_data(), row.size_bytes(), out->dimensions()[0], out->untyped_data());
  return ffi::Error::Success();
}

ffi::Error pooled_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                              ffi::RemainingArgs table, ffi::RemainingRets results,
                              Numbers layout) {
  Parts from, out;
  if (ffi::Error error = from.add(table, table.size()); error.failure()) return error;
  if (ffi::Error error = out.add(results); error.failure()) return error;
  Team team = make_team(pool);
  const Batch batch = {ids.typed_data(), lengths.typed_data(), given(weights), read_layout(layout)};
  const Rows rows = from.rows();
  pooled_lookup(team, {&rows, 0, from.type(), from.num_rows(), from.dim()}, batch, out.rows(),
                out.type());
  return ffi::Error::Success();
}

ffi::Error flatten_bags_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                             ffi::Result<Ints> rows, ffi::Result<Ints> bags,
                             ffi::Result<Floats> scales, Numbers layout, int64_t num_rows) {
  Team team = make_team(pool);
  const Batch batch = {ids.typed_data(), lengths.typed_data(), given(weights), read_layout(layout)};
  flatten_bags(team, num_rows, batch, rows->typed_data(), bags->typed_data(), given(*scales));
  return ffi::Error::Success();
}

ffi::Error row_lookup_call(ffi::ThreadPool pool, Ints rows, ffi::RemainingArgs table,
                           ffi::RemainingRets results) {
  Parts from, out;
  if (ffi::Error error = from.add(table, table.size()); error.failure()) return error;
  if (ffi::Error error = out.add(results); error.failure()) return error;
  Team team = make_team(pool);
  const Rows source = from.rows();
  row_lookup(team, {&source, 0, from.type(), from.num_rows(), from.dim()}, rows.typed_data(),
             rows.element_count(), out.rows());
  return ffi::Error::Success();
}

PackedTable packed_table_of(const ffi::Buffer<ffi::U8>& packed, int32_t code, int64_t dim) {
  const auto dimensions = packed.dimensions();
  return {packed.typed_data(), static_cast<Code>(code), dimensions[0], dimensions[1], dim};
}

ffi::Error packed_pooled_lookup_call(ffi::ThreadPool pool, Ints ids, Ints lengths, Floats weights,
                                     ffi::Buffer<ffi::U8> packed,
                                     ffi::Result<ffi::AnyBuffer> out, Numbers layout,
                                     int32_t code) {
  Team team = make_team(pool);
  const Batch batch = {ids.typed_data(), lengths.typed_data(), given(weights), read_layout(layout)};
  packed_pooled_lookup(team, packed_table_of(packed, code, out->dimensions()[1]), batch,
                       out->untyped_data(), type_of(out->element_type()));
  return ffi::Error::Success();
}

ffi::Error packed_row_lookup_call(ffi::ThreadPool pool, Ints rows, ffi::Buffer<ffi::U8> packed,
                                  ffi::Result<ffi::AnyBuffer> out, int32_t code) {
  Team team = make_team(pool);
  packed_row_lookup(team, packed_table_of(packed, code, out->dimensions()[1]), rows.typed_data(),
                    rows.element_count(), out->untyped_data(), type_of(out->element_type()));
  return ffi::Error::Success();
}

ffi::Error build_runs_call(ffi::ThreadPool pool, Ints rows, ffi::Result<Ints> order,
                           ffi::Result<Ints> segments, ffi::Result<Ints> unique,
                           ffi::Result<Ints> inverse, int64_t num_rows) {
  Team team = make_team(pool);
  build_runs(team, rows.typed_data(), rows.element_count(), num_rows, order->typed_data(),
             segments->typed_data(), unique->typed_data(), inverse->typed_data());
  return ffi::Error::Success();
}

ffi::Error bucket_call(ffi::ThreadPool pool, Ints owners, ffi::Result<Ints> order,
                       ffi::Result<Ints> counts) {
  Team team = make_team(pool);
  bucket(team, owners.typed_data(), owners.element_count(), counts->element_count(),
         order->typed_data(), counts->typed_data());
  return ffi::Error::Success();
}

ffi::Error shift_rows_call(ffi::ThreadPool pool, Ints rows, ffi::Result<Ints> out, Numbers starts,
                           Numbers shifts, int64_t num_rows, int64_t outside) {
  Team team = make_team(pool);
  shift_rows(team, rows.typed_data(), rows.element_count(), starts.begin(), shifts.begin(),
             static_cast<int64_t>(starts.size()), num_rows, static_cast<int32_t>(outside),
             out->typed_data());
  return ffi::Error::Success();
}

ffi::Error sum_rows_call(ffi::ThreadPool pool, Ints rows, Ints bags, Floats scales,
                         ffi::AnyBuffer gradients, ffi::RemainingRets results, float bound) {
  Parts from, out;
  from.add(gradients.untyped_data(), gradients.element_type(), gradients.dimensions());
  if (ffi::Error error = out.add(results); error.failure()) return error;
  Team team = make_team(pool);
  const Rows source = from.rows();
  sum_rows(team, out.rows(), out.num_rows(), rows.typed_data(), rows.element_count(),
           {&source, from.type(), from.dim(), given(bags), from.num_rows(), given(scales), bound});
  return ffi::Error::Success();
}

// Reads the attributes of an update: the fields of `Step`, by name. The first failure stays.
class StepReader {
 public:
  explicit StepReader(ffi::Dictionary attributes) : attributes_(attributes) {}

  template <class T>
  T get(std::string_view name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (error.success()) error = value.error();
    return T{};
  }

  ffi::Error error = ffi::Error::Success();

 private:
  ffi::Dictionary attributes_;
};

Step read_step(StepReader& reader) {
  Step step = {};
  step.rule = static_cast<Rule>(reader.get<int32_t>("rule"));
  step.eps = reader.get<float>("eps");
  step.b1 = reader.get<float>("b1");
  step.b2 = reader.get<float>("b2");
  step.rest1 = reader.get<float>("rest1");
  step.rest2 = reader.get<float>("rest2");
  step.log_b1 = reader.get<float>("log_b1");
  step.log_b2 = reader.get<float>("log_b2");
  step.counts_rows = reader.get<bool>("counts_rows");
  step.weight_decay = reader.get<float>("weight_decay");
  step.decay = static_cast<Decay>(reader.get<int32_t>("decay"));
  step.max_norm = reader.get<float>("max_norm");
  step.stochastic = reader.get<bool>("stochastic");
  return step;
}

// Operands: rows, bags (or none), scales (or none), [rate, share1, share2], number of the step; then
// the parts of the gradients, and the table and its state, which are the results too, in the same
// memory.
ffi::Error fused_update_call(ffi::ThreadPool pool, Ints rows, Ints bags, Floats scales,
                             Floats rates, Ints number, ffi::RemainingArgs operands,
                             ffi::Result<ffi::AnyBuffer> table,
                             ffi::RemainingRets state, ffi::Dictionary attributes) {
  StepReader reader(attributes);
  Step step = read_step(reader);
  const float bound = reader.get<float>("bound");
  const int64_t num_parts = reader.get<int64_t>("parts");
  if (reader.error.failure()) return reader.error;
  Parts gradients;
  if (ffi::Error error = gradients.add(operands, num_parts); error.failure()) return error;
  step.rate = rates.typed_data()[0];
  step.share1 = rates.typed_data()[1];
  step.share2 = rates.typed_data()[2];
  step.step = static_cast<uint32_t>(*number.typed_data());
  float** places[] = {&step.first, &step.second, &step.counts};
  for (size_t i = 0; i < state.size(); ++i) {
    auto array = state.get<Floats>(i);
    if (!array.has_value()) return array.error();
    *places[i] = (*array)->typed_data();
  }
  Team team = make_team(pool);
  const Rows source = gradients.rows();
  fused_update(team, table_of(table->untyped_data(), table->element_type(), table->dimensions()),
               step, rows.typed_data(), rows.element_count(),
               {&source, gradients.type(), gradients.dim(), given(bags), gradients.num_rows(),
                given(scales), bound});
  return ffi::Error::Success();
}

// `[..., num_vectors, dim]`: all dimensions before are samples.
Vectors vectors_of(const Floats& vectors) {
  const auto dimensions = vectors.dimensions();
  const size_t rank = dimensions.size();
  int64_t samples = 1;
  for (size_t i = 0; i + 2 < rank; ++i) samples *= dimensions[i];
  return {vectors.typed_data(), samples, dimensions[rank - 2], dimensions[rank - 1]};
}

ffi::Error pair_products_call(ffi::ThreadPool pool, Floats vectors, ffi::Result<Floats> products) {
  Team team = make_team(pool);
  pair_products(team, vectors_of(vectors), products->typed_data());
  return ffi::Error::Success();
}

ffi::Error pair_gradients_call(ffi::ThreadPool pool, Floats vectors, Floats gradient,
                               ffi::Result<Floats> out) {
  Team team = make_team(pool);
  pair_gradients(team, vectors_of(vectors), gradient.typed_data(), out->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxrec

#define JAXREC_VISIBLE __attribute__((visibility("default")))

#define JAXREC_EXPORT(name, function, ...)                         \
  extern "C" JAXREC_VISIBLE XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, __VA_ARGS__)

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
                  .Arg<ffi::Buffer<ffi::U8>>()
                  .Ret<ffi::AnyBuffer>()
                  .Attr<jaxrec::Numbers>("layout")
                  .Attr<int32_t>("code"));

JAXREC_EXPORT(jaxrec_packed_row_lookup, jaxrec::packed_row_lookup_call,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<jaxrec::Ints>()
                  .Arg<ffi::Buffer<ffi::U8>>()
                  .Ret<ffi::AnyBuffer>()
                  .Attr<int32_t>("code"));

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

extern "C" {

JAXREC_VISIBLE const char* jaxrec_instruction_set() { return jaxrec::kernels().name; }

JAXREC_VISIBLE int jaxrec_select(const char* name) { return jaxrec::select_kernels(name); }

// The version of jaxlib whose headers were used: the oldest that the library runs on.
JAXREC_VISIBLE const char* jaxrec_jaxlib() { return JAXREC_JAXLIB; }

}  // extern "C"
