// Dot products of the vectors of each sample, all pairs, and their gradients.
#ifndef JAXREC_DOT_PRODUCTS_H_
#define JAXREC_DOT_PRODUCTS_H_

#include "kernels.h"
#include "team.h"

namespace jaxrec {

// Writes the products of a sample's pairs in the order (0, 1), (0, 2), ..., (1, 2), ...
void pair_products(Team& team, const Vectors& of, float* products);

// Writes the gradients of the vectors from those of the products.
void pair_gradients(Team& team, const Vectors& of, const float* gradient, float* out);

}  // namespace jaxrec

#endif  // JAXREC_DOT_PRODUCTS_H_
