// Checks of maxima, their gradients and dropped ids. Included by native_check.cc, after its data.

// The largest element of each column of each bag, and the lookup that has it, by a plain loop.
// element(row, column) reads the table.
template <class Element>
void largest_of(const Data& data, const Element& element, std::vector<float>& values,
                std::vector<int32_t>& winners) {
  const int64_t dim = data.shape.dim;
  values.assign(data.num_bags() * dim, 0.0f);
  winners.assign(values.size(), -1);
  for (const Feature& feature : data.features) {
    int64_t begin = 0;
    for (int64_t bag = 0; bag < feature.stride; ++bag) {
      const int64_t length = std::max(data.lengths[feature.length_start + bag], 0);
      const int64_t end = std::min(begin + length, feature.capacity);
      const int64_t out = (feature.out_row + bag * feature.out_step) * dim;
      bool is_bad = false;
      for (int64_t i = begin; i < end; ++i) {
        const int32_t id = data.ids[feature.id_start + i];
        is_bad = is_bad || id < 0 || id >= feature.row_count;
      }
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t i = begin; i < end && !is_bad; ++i) {
          const float x = element(feature.row_offset + data.ids[feature.id_start + i], d);
          if (i > begin && !(x > values[out + d])) continue;
          values[out + d] = x;
          winners[out + d] = static_cast<int32_t>(feature.first_position + i);
        }
        if (is_bad) values[out + d] = NAN;
      }
      begin = end;
    }
  }
}

// look_up(team, batch, out, winners) with `out` float32 and `winners` null once.
template <class Element, class LookUp>
void check_largest(const Data& data, const Element& element, const LookUp& look_up) {
  std::vector<float> values;
  std::vector<int32_t> expected;
  largest_of(data, element, values, expected);
  for (int threads : team_sizes({1, 5})) {
    for (bool has_winners : {true, false}) {
      std::vector<float> out(values.size());
      std::vector<int32_t> winners(has_winners ? values.size() : 0);
      with_team(threads, [&](Team& team) {
        look_up(team, data.batch(), out.data(), has_winners ? winners.data() : nullptr);
      });
      for (size_t i = 0; i < out.size(); ++i) {
        require(is_close(out[i], values[i], 1e-6), "maxima, " + name_of(data.shape));
      }
      require(!has_winners || winners == expected, "winners, " + name_of(data.shape));
    }
  }
}

void check_max(Data data) {
  data.weights.clear();
  const Case& shape = data.shape;
  for (int64_t num_parts : {int64_t{1}, shape.num_features}) {
    const Apart table = data.table_apart(num_parts);
    const Rows rows = table.rows();
    check_largest(
        data,
        [&](int64_t row, int64_t d) {
          return read(data.table.data(), shape.type, row * shape.dim + d);
        },
        [&](Team& team, const Batch& batch, float* out, int32_t* winners) {
          max_lookup(team, data.source(rows), batch, out, Type::kF32, winners);
        });
  }
  for (Code code : {Code::kInt8, Code::kInt4, Code::kInt2}) {
    const int64_t row_bytes = kernels().packed_row_bytes(code, shape.dim);
    const std::vector<uint8_t> packed = packed_table(code, data.num_rows(), row_bytes);
    const PackedTable table = {packed.data(), code, data.num_rows(), row_bytes, shape.dim};
    check_largest(
        data,
        [&](int64_t row, int64_t d) {
          return packed_element(packed.data() + row * row_bytes, code, d);
        },
        [&](Team& team, const Batch& batch, float* out, int32_t* winners) {
          packed_max_lookup(team, table, batch, out, Type::kF32, winners);
        });
  }
}

// Lengths that do not fit their ids lead neither past the end nor to a largest element of no rows.
void check_max_of_bad_lengths(const Case& shape) {
  for (int32_t bad : bad_lengths()) {
    Data data(shape);
    for (size_t i = 0; i < data.lengths.size(); i += 2) data.lengths[i] = bad;
    check_max(data);
  }
}

void check_max_gradients(int64_t num_bags, int64_t num_lookups, int64_t dim) {
  std::vector<int32_t> winners(num_bags * dim, -1);
  std::vector<float> gradients(num_bags * dim), expected(num_lookups * dim);
  std::vector<int32_t> bags(num_lookups);  // Of three lookups each; some of the rest are of no bag.
  for (int64_t i = 0; i < num_lookups; ++i) {
    bags[i] = i / 3 >= num_bags && i % 2 == 0 ? -1 : static_cast<int32_t>(i / 3);
  }
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    for (int64_t d = 0; d < dim; ++d) {
      // Each bag has lookups of its own, and those behind the last name none.
      int32_t winner = static_cast<int32_t>(3 * bag + random() % 3);
      if (random() % 9 == 0) winner = random() % 2 == 0 ? std::numeric_limits<int32_t>::min() : -1;
      winners[bag * dim + d] = winner;
      gradients[bag * dim + d] = static_cast<float>(random() % 100);
      if (winner < 0 || winner >= num_lookups) continue;
      expected[winner * dim + d] = gradients[bag * dim + d];
    }
  }
  for (int threads : team_sizes({1, 4})) {
    std::vector<float> out(num_lookups * dim, NAN);
    with_team(threads, [&](Team& team) {
      max_gradients(team, winners.data(), gradients.data(), num_bags, dim, bags.data(), out.data(),
                    num_lookups);
    });
    require(out == expected, "gradients of maxima");
  }
}

// `most` is the longest bag; bags of `odd` lengths are negative or longer than the capacity.
void check_drop_ids(int64_t num_features, int64_t stride, int64_t capacity, int most, bool odd) {
  std::vector<int32_t> ids(num_features * (capacity + 1)), lengths(num_features * stride);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % 3);
  for (int32_t& length : lengths) {
    length = static_cast<int32_t>(random() % (most + 1));
    if (odd && random() % 5 == 0) length = random() % 2 == 0 ? -7 : std::numeric_limits<int32_t>::max();
  }
  std::vector<DroppingFeature> features;
  std::vector<int32_t> expected = ids, expected_lengths = lengths;
  for (int64_t f = 0; f < num_features; ++f) {
    // The position behind each feature belongs to none.
    features.push_back({f * (capacity + 1), capacity, f * stride, stride, static_cast<int32_t>(f % 3)});
    const DroppingFeature& feature = features.back();
    int64_t position = 0, kept = 0;
    for (int64_t bag = 0; bag < stride; ++bag) {
      const int64_t length = std::max(lengths[feature.length_start + bag], 0);
      const int64_t end = std::min(position + length, capacity), first = kept;
      for (; position < end; ++position) {
        const int32_t id = ids[feature.id_start + position];
        if (id != feature.dropped) expected[feature.id_start + kept++] = id;
      }
      expected_lengths[feature.length_start + bag] = static_cast<int32_t>(kept - first);
    }
    for (; kept < capacity; ++kept) expected[feature.id_start + kept] = feature.dropped;
  }
  for (int threads : team_sizes({1, 4})) {
    std::vector<int32_t> found(ids.size()), new_lengths(lengths.size()), sources(ids.size(), -1);
    with_team(threads, [&](Team& team) {
      drop_ids(team, ids.data(), static_cast<int64_t>(ids.size()), lengths.data(),
               static_cast<int64_t>(lengths.size()), features, found.data(), new_lengths.data(),
               sources.data());
    });
    require(found == expected && new_lengths == expected_lengths, "dropped ids");
    for (int32_t source : sources) {
      require(source >= 0 && source < static_cast<int32_t>(ids.size()), "sources of ids");
    }
  }
}
