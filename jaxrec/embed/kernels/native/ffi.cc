// The primitives as XLA calls them: attributes and buffers in, buffers out.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "lookup.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxrec {
namespace {

using Numbers = ffi::Span<const int64_t>;

Team make_team(ffi::ThreadPool& pool) {
  int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  int threads = static_cast<int>(std::clamp<int64_t>(pool.num_threads(), 1, cores));
  return Team([&pool](std::function<void()> help) { pool.Schedule(std::move(help)); }, threads);
}

ffi::ErrorOr<Type> type_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return Type::kF32;
    case ffi::BF16: return Type::kBF16;
    case ffi::F16: return Type::kF16;
    default: return ffi::Unexpected(ffi::Error::InvalidArgument("rows are float32, bfloat16 or float16"));
  }
}

// Seven numbers a feature, in the order of BagLayout's fields in base.py.
std::vector<Feature> read_layout(Numbers numbers) {
  std::vector<Feature> features;
  int64_t position = 0, bag = 0;
  for (const int64_t* n = numbers.begin(); n != numbers.end(); n += 7) {
    features.push_back({n[0], n[1], n[2], n[3], n[4], n[5], n[6] != 0, position, bag, 1});
    position += n[1];
    bag += n[3];
  }
  const int64_t count = static_cast<int64_t>(features.size());
  const bool uniform = std::all_of(features.begin(), features.end(), [&](const Feature& feature) {
    return feature.stride == features[0].stride;
  });
  for (int64_t f = 0; uniform && f < count; ++f) {
    features[f].out_row = f;
    features[f].out_step = count;
  }
  return features;
}

ffi::Error pooled(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::Buffer<ffi::S32> ids,
                  ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> weights,
                  ffi::Result<ffi::AnyBuffer> out, Numbers layout) {
  auto type = type_of(table.element_type());
  auto out_type = type_of(out->element_type());
  if (!type.has_value()) return type.error();
  if (!out_type.has_value()) return out_type.error();
  Batch batch = {ids.typed_data(), lengths.typed_data(),
                 weights.element_count() == 0 ? nullptr : weights.typed_data(),
                 read_layout(layout)};
  Table rows = {table.untyped_data(), *type, table.dimensions()[0], table.dimensions()[1]};
  Team team = make_team(pool);
  pooled_lookup(team, rows, batch, out->untyped_data(), *out_type);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxrec

#define JAXREC_EXPORT(name, function, ...)                                                \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, __VA_ARGS__)

JAXREC_EXPORT(jaxrec_pooled_lookup, jaxrec::pooled,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<jaxrec::Numbers>("layout"));
