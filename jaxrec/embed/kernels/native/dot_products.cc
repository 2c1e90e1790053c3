#include "dot_products.h"

#include <algorithm>
#include <memory>

namespace jaxrec {
namespace {

// Multiplications that take one thread about as long as waking another.
constexpr int64_t kFew = 1 << 17;

// Calls work(first sample, number of samples) for pieces of the samples.
template <class Work>
void cut(Team& team, const Vectors& of, const Work& work) {
  const int64_t each = std::max<int64_t>(of.num_pairs() * of.dim, 1);
  const int64_t size = std::max<int64_t>(2 * kFew / each, 1);
  const int64_t pieces = (of.num_samples + size - 1) / size;
  team.run(pieces, [&](int64_t piece) {
    const int64_t first = piece * size;
    work(first, std::min(size, of.num_samples - first));
  }, of.num_samples * each <= kFew);
}

Vectors samples(const Vectors& of, int64_t first, int64_t count) {
  return {of.vectors + first * of.num_vectors * of.dim, count, of.num_vectors, of.dim};
}

}  // namespace

void pair_products(Team& team, const Vectors& of, float* products) {
  cut(team, of, [&](int64_t first, int64_t count) {
    const std::unique_ptr<float[]> scratch(new float[multiply_pairs_scratch(of)]());
    kernels().multiply_pairs({samples(of, first, count), products + first * of.num_pairs()},
                             scratch.get());
  });
}

void pair_gradients(Team& team, const Vectors& of, const float* gradient, float* out) {
  cut(team, of, [&](int64_t first, int64_t count) {
    kernels().sum_pairs({samples(of, first, count), gradient + first * of.num_pairs(),
                         out + first * of.num_vectors * of.dim});
  });
}

}  // namespace jaxrec
