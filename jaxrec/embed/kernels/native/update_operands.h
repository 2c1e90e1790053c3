// The operands and attributes of updates and sums of gradients, checked.
#ifndef JAXREC_UPDATE_OPERANDS_H_
#define JAXREC_UPDATE_OPERANDS_H_

#include <string_view>
#include <vector>

#include "checks.h"
#include "operands.h"

namespace jaxrec {

// The bag and the scale of each lookup may be missing. Without bags there is a gradient a lookup.
inline bool are_lookups(Checks& checks, const Ints& rows, const Ints& bags, const Floats& scales,
                 int64_t num_gradients) {
  if (!checks.is_list("rows", rows)) return false;
  const int64_t count = rows.dimensions()[0];
  checks.has_length("bags", bags, count, true);
  checks.has_length("scales", scales, count, true);
  return checks.require(bags.element_count() > 0 || count == 0 || count == num_gradients,
                        "`rows` has ", count, " elements, without `bags`; `gradients` has ",
                        num_gradients, " rows");
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

inline Step read_step(StepReader& reader) {
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

// The elements of each array that a rule keeps for a table, in the order of Step's pointers.
inline std::vector<int64_t> state_sizes(const Step& step, int64_t num_rows, int64_t dim) {
  std::vector<int64_t> sizes;
  switch (step.rule) {
    case Rule::kSgd: break;
    case Rule::kAdagrad: sizes = {num_rows * dim}; break;
    case Rule::kRowwiseAdagrad: sizes = {num_rows}; break;
    case Rule::kAdam: sizes = {num_rows * dim, num_rows * dim}; break;
    case Rule::kPartialRowwiseAdam: sizes = {num_rows * dim, num_rows}; break;
  }
  if (step.counts_rows) sizes.push_back(num_rows);
  return sizes;
}

// Whether a result lies in the memory of an operand.
inline bool is_in_place(Checks& checks, ffi::RemainingArgs operands, size_t i, void* result) {
  const auto operand = operands.get<ffi::AnyBuffer>(i);
  if (!operand.has_value()) return checks.require(operand.error());
  return checks.require(operand->untyped_data() == result,
                        "the table or its state is not updated in place");
}

}  // namespace jaxrec

#endif  // JAXREC_UPDATE_OPERANDS_H_
