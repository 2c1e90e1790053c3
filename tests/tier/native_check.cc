// The native id map, batch operations and records of files without Python: random programs, compared with the
// standard library. Built with sanitizers by tests/sanitize.sh.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "batch_ops.h"
#include "hash_map.h"
#include "id_map.h"
#include "row_records.h"

using namespace jaxrec;

// What Python calls; library.cc has no header.
extern "C" {
IdMap* jaxrec_id_map_new(int64_t, uint64_t, int64_t);
void jaxrec_id_map_delete(IdMap*);
int64_t jaxrec_id_map_size(const IdMap*);
void jaxrec_id_map_find(const IdMap*, const int64_t*, int64_t, int32_t*, int64_t);
int64_t jaxrec_id_map_insert(IdMap*, const int64_t*, const int32_t*, int64_t);
int64_t jaxrec_id_map_remove(IdMap*, const int64_t*, int64_t, int32_t*);
int64_t jaxrec_id_map_items(const IdMap*, int64_t, int64_t*, int32_t*);
void jaxrec_read_records(uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t, uint64_t*, int64_t,
                         const int64_t*, const int64_t*, int64_t, int64_t*, uint8_t*, uint8_t*,
                         int64_t);
int64_t jaxrec_write_records(uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t, uint64_t*,
                             int64_t, const int64_t*, const int64_t*, int64_t, const uint8_t*,
                             int64_t);
int64_t jaxrec_id_maps_look_up(int64_t, const IdMap* const*, const int64_t* const*, const int64_t*,
                               int32_t* const*, int64_t, uint64_t, int32_t*, int64_t*, int32_t*,
                               int32_t*, int64_t*);
}

namespace {

using Random = std::mt19937_64;
using Expected = std::unordered_map<int64_t, int32_t>;

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// The id whose hash, with seed 0, is given.
int64_t unhash(uint64_t hash) {
  hash ^= hash >> 33;
  hash *= 0x9CB4B2F8129337DBull;
  hash ^= hash >> 33;
  hash *= 0x4F74430C22A54005ull;
  return static_cast<int64_t>(hash ^ hash >> 33);
}

void require_equal(const IdMap& map, const Expected& expected) {
  const size_t size = expected.size();
  require(map.size() == static_cast<int64_t>(size), "size");
  std::vector<int64_t> ids(size);
  std::vector<int32_t> slots(size), found(size);
  map.items(ids.data(), slots.data());
  map.find(ids.data(), static_cast<int64_t>(size), found.data());
  require(found == slots, "the slots of all ids");
  for (size_t i = 0; i < size; ++i) {
    auto item = expected.find(ids[i]);
    require(item != expected.end() && item->second == slots[i], "items");
  }
}

// Ids of all homes, ids in a row, ids whose home is the last bucket, or a range that indexes a table.
enum Shape { kSpread, kSequential, kOneHome, kRange };

// Batches that are inserted and removed, some of them with an id that is refused.
void check_program(int64_t capacity, Shape shape, Random& random) {
  const uint64_t seed = shape == kOneHome ? 0 : random();
  const auto made = new_id_map(capacity, seed, shape == kRange ? 2 * capacity + 1 : 0);
  IdMap& map = *made;
  Expected expected;
  auto draw_id = [&]() -> int64_t {
    const uint64_t number = random() % (2 * capacity + 1);
    if (shape == kOneHome) return unhash(~number);
    if (shape == kRange) return static_cast<int64_t>(number);
    return static_cast<int64_t>(shape == kSequential ? number - 5 : number * 0x9E3779B97F4A7C15);
  };
  for (int batch = 0; batch < 60; ++batch) {
    const bool inserts = random() % 2 == 0, is_clean = random() % 4 != 0;
    const int64_t most = inserts ? capacity - map.size() : map.size();
    std::vector<int64_t> ids;
    Expected after = expected;
    int64_t refused = -1;
    for (int64_t tries = random() % (2 * capacity + 1); tries > 0; --tries) {
      if (static_cast<int64_t>(ids.size()) == most) break;
      const int64_t id = draw_id();
      if (id == kNoId) continue;
      const bool fits = (after.count(id) == 0) == inserts;
      if (!fits && is_clean) continue;
      if (!fits && refused < 0) refused = static_cast<int64_t>(ids.size());
      if (inserts) after.emplace(id, static_cast<int32_t>(ids.size() + 7));
      else after.erase(id);
      ids.push_back(id);
    }
    const int64_t count = static_cast<int64_t>(ids.size());
    std::vector<int32_t> slots(count);
    std::iota(slots.begin(), slots.end(), 7);
    const int64_t done = inserts ? map.insert(ids.data(), slots.data(), count)
                                 : map.remove(ids.data(), count, slots.data());
    require(done == (refused < 0 ? count : refused), "the position of the refused id");
    if (refused < 0 && !inserts) {
      for (int64_t i = 0; i < count; ++i) require(slots[i] == expected[ids[i]], "removed slots");
    }
    if (refused < 0) expected = std::move(after);
    require_equal(map, expected);
    for (int i = 0; i < 20; ++i) {
      const int64_t id = i == 0 ? kNoId : draw_id();
      int32_t slot;
      map.find(&id, 1, &slot);
      require(slot == (expected.count(id) ? expected[id] : kNoSlot), "find");
    }
  }
}

// `num_ids` as in IdMap.
void check_threads(int64_t num_ids) {
  constexpr int64_t kCount = 40000;
  IdMap* map = jaxrec_id_map_new(4 * kCount, 1, num_ids);
  std::vector<int64_t> ids(kCount);
  std::vector<int32_t> slots(kCount);
  std::iota(ids.begin(), ids.end(), 0);
  std::iota(slots.begin(), slots.end(), 0);
  require(jaxrec_id_map_insert(map, ids.data(), slots.data(), kCount) == kCount, "insert");
  std::vector<std::thread> threads;
  for (int64_t thread = 1; thread <= 3; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<int64_t> others = ids;
      for (int64_t& id : others) id += thread * kCount;
      std::vector<int32_t> found(kCount);
      for (int round = 0; round < 5; ++round) {
        jaxrec_id_map_insert(map, others.data(), slots.data(), kCount);
        jaxrec_id_map_find(map, ids.data(), kCount, found.data(), 3);
        require(found == slots, "find beside insertions");
        require(jaxrec_id_map_size(map) >= 2 * kCount, "size beside insertions");
        jaxrec_id_map_remove(map, others.data(), kCount, found.data());
        require(found == slots, "remove");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  require(jaxrec_id_map_items(map, kCount, ids.data(), slots.data()) == kCount, "items");
  require(jaxrec_id_map_items(map, 0, nullptr, nullptr) == kCount, "items without room");
  const std::vector<int64_t> many(4 * kCount);
  require(jaxrec_id_map_insert(map, many.data(), slots.data(), 4 * kCount) == -1, "no room");
  jaxrec_id_map_delete(map);
}

void check_distinct(int64_t count, uint64_t num_ids, Random& random) {
  std::vector<int64_t> ids(count), unique(count);
  std::vector<int32_t> inverse(count), counts(count);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % num_ids) - 1;
  const int64_t size =
      distinct(ids.data(), count, random(), unique.data(), inverse.data(), counts.data());
  std::unordered_map<int64_t, int32_t> first;
  std::vector<int32_t> expected_counts;
  for (int64_t i = 0; i < count; ++i) {
    const auto next = static_cast<int32_t>(first.size());
    const int32_t number = first.emplace(ids[i], next).first->second;
    if (number == next) expected_counts.push_back(0);
    ++expected_counts[number];
    require(inverse[i] == number && unique[number] == ids[i], "inverse");
  }
  counts.resize(size);
  require(counts == expected_counts, "counts");
}

void check_look_up(Random& random) {
  constexpr int64_t kMaps = 3, kCount = 5000;
  std::vector<const IdMap*> maps;
  std::vector<std::vector<int64_t>> ids(kMaps);
  std::vector<std::vector<int32_t>> slots(kMaps);
  std::vector<const int64_t*> given;
  std::vector<int32_t*> taken;
  std::vector<int64_t> counts, sizes(2 * kMaps), unique(kMaps * kCount);
  std::vector<int32_t> positions(kMaps * kCount), inverse(kMaps * kCount), occurrences(kMaps * kCount);
  for (int64_t map = 0; map < kMaps; ++map) {
    IdMap* resident = jaxrec_id_map_new(1000, random(), map == 2 ? 1000 : 0);
    std::vector<int64_t> known(1000);
    std::vector<int32_t> places(1000, 3);
    std::iota(known.begin(), known.end(), 0);
    jaxrec_id_map_insert(resident, known.data(), places.data(), 1000);
    maps.push_back(resident);
    counts.push_back(map == 1 ? 0 : kCount);
    for (int64_t i = 0; i < counts[map]; ++i) {
      ids[map].push_back(static_cast<int64_t>(random() % 1500) - 1);
    }
    slots[map].resize(counts[map]);
    given.push_back(ids[map].data());
    taken.push_back(slots[map].data());
  }
  require(jaxrec_id_maps_look_up(kMaps, maps.data(), given.data(), counts.data(), taken.data(), 2,
                                 random(), positions.data(), unique.data(), inverse.data(),
                                 occurrences.data(), sizes.data()) == 0, "look_up");
  int64_t position = 0, first = 0;
  for (int64_t map = 0; map < kMaps; ++map) {
    std::vector<int32_t> times(sizes[2 * map + 1]);
    for (int64_t i = 0; i < counts[map]; ++i) {
      const bool is_known = ids[map][i] >= 0 && ids[map][i] < 1000;
      require(slots[map][i] == (is_known ? 3 : kNoSlot), "slots of several maps");
      if (is_known) continue;
      require(positions[position] == i, "positions of absent ids");
      require(unique[first + inverse[position]] == ids[map][i], "absent ids");
      ++times[inverse[position++]];
    }
    require(std::equal(times.begin(), times.end(), occurrences.begin() + first), "occurrences");
    first += sizes[2 * map + 1];
    jaxrec_id_map_delete(const_cast<IdMap*>(maps[map]));
  }
}

void check_smallest(int64_t count, int64_t k, int kind, Random& random) {
  std::vector<uint64_t> keys(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t draws[] = {random(), random() % 10, 0, ~uint64_t{0},
                              static_cast<uint64_t>(count - i)};
    keys[i] = draws[kind];
  }
  std::vector<uint8_t> eligible(count);
  for (uint8_t& flag : eligible) flag = random() % 2;
  for (const uint8_t* flags : {static_cast<const uint8_t*>(nullptr),
                               static_cast<const uint8_t*>(eligible.data())}) {
    std::vector<int32_t> expected;
    for (int64_t i = 0; i < count; ++i) {
      if (flags == nullptr || flags[i]) expected.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(expected.begin(), expected.end(),
                     [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
    if (static_cast<int64_t>(expected.size()) > k) expected.resize(k);
    std::vector<int32_t> indices(expected.size());
    require(smallest(keys.data(), flags, count, k, indices.data()) ==
                static_cast<int64_t>(expected.size()), "number of smallest keys");
    require(indices == expected, "smallest keys");
  }
}

void check_record_uses() {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  const std::vector<int32_t> slots = {0, -1, 2, 0, 1}, bad = {2, 3};
  std::vector<uint32_t> counts = {1, kMost, kMost - 1, 8};
  std::vector<int64_t> last_use = {5, 6, 7, 8};
  require(record_uses(slots.data(), 5, 9, counts.data(), last_use.data(), 4) == 5, "record_uses");
  require(counts == std::vector<uint32_t>({3, kMost, kMost, 8}), "counts of uses");
  require(last_use == std::vector<int64_t>({9, 9, 9, 8}), "last uses");
  require(record_uses(bad.data(), 2, 10, counts.data(), last_use.data(), 3) == 1,
          "a slot without a count");
  require(last_use == std::vector<int64_t>({9, 9, 9, 8}), "last uses after a bad slot");
}

// Records of a sparse file, written and read by several threads.
void check_records(int64_t width, bool has_id, Random& random) {
  constexpr int64_t kRoom = 20000, kStart = 4096, kThreads = 4;
  const int64_t stride = (width + (has_id ? 16 : 8) + 7) / 8 * 8;
  const int64_t size = ((kStart + kRoom * stride) / kPageBytes + 2) * kPageBytes;
  std::FILE* file = std::tmpfile();
  const int descriptor = fileno(file);
  require(ftruncate(descriptor, size) == 0, "ftruncate");
  void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  require(map != MAP_FAILED, "mmap");
  auto* base = static_cast<uint8_t*>(map);
  std::vector<uint64_t> pages(size / kPageBytes / 64 + 1);
  std::vector<int64_t> slots(kRoom), ids(kRoom), found_ids(kRoom);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  for (int64_t i = 0; i < kRoom; ++i) ids[i] = has_id ? static_cast<int64_t>(random()) : slots[i];
  std::vector<uint8_t> records(kRoom * width), same(kRoom * width), found(kRoom);
  const int64_t half = kRoom / 2;
  for (int round = 0; round < 3; ++round) {
    for (uint8_t& byte : records) byte = static_cast<uint8_t>(random());
    require(jaxrec_write_records(base, kStart, stride, width, has_id, descriptor,
                                 round == 1 ? nullptr : pages.data(), 1, slots.data(), ids.data(),
                                 half, records.data(), kThreads) == 0, "write_records");
    jaxrec_read_records(base, kStart, stride, width, has_id, descriptor, pages.data(), 1,
                        slots.data(), round == 1 ? nullptr : ids.data(), kRoom, found_ids.data(),
                        found.data(), same.data(), kThreads);
    for (int64_t i = 0; i < kRoom; ++i) {
      require(found[i] == (i < half), "records that are found");
      require(round != 1 || i >= half || !has_id || found_ids[i] == ids[i], "their ids");
    }
    require(std::equal(records.begin(), records.begin() + half * width, same.begin()), "records");
  }
  base[kStart + slots[0] * stride + 8] ^= 1;  // of the id or the record
  require(erase_records({base, kStart, stride, width, has_id}, descriptor, slots.data() + 1, 1) == 0,
          "erase_records");
  jaxrec_read_records(base, kStart, stride, width, has_id, descriptor, pages.data(), 1, slots.data(),
                      ids.data(), 3, found_ids.data(), found.data(), same.data(), 1);
  require(!found[0] && !found[1] && found[2], "damaged and erased records");
  munmap(map, size);
  std::fclose(file);
}

// Two tables whose ids are replaced batch by batch; the second one refuses an id in the end.
void check_commit(Random& random) {
  constexpr int64_t kRoom = 500, kNew = 200;
  struct Table {
    HashMap map{kRoom, 3};
    std::vector<int64_t> ids = std::vector<int64_t>(kRoom), born = std::vector<int64_t>(kRoom, -1);
    std::vector<uint32_t> counts = std::vector<uint32_t>(kRoom, 9);
    std::vector<uint8_t> powers = std::vector<uint8_t>(kRoom);
    std::vector<int32_t> order = std::vector<int32_t>(kRoom), rows = std::vector<int32_t>(kNew);
    std::vector<int64_t> new_ids = std::vector<int64_t>(kNew), evicted = std::vector<int64_t>(kNew);
  };
  std::vector<Table> tables(2);
  std::vector<int32_t> positions(kNew);
  std::iota(positions.begin(), positions.end(), 0);
  for (Table& table : tables) std::iota(table.order.begin(), table.order.end(), 0);
  for (int64_t batch = 0; batch < 20; ++batch) {
    std::vector<Change> changes;
    for (Table& table : tables) {
      // The first rows lose their ids, if they have any, and get new ones.
      std::shuffle(table.order.begin(), table.order.end(), random);
      std::partition(table.order.begin(), table.order.begin() + kNew,
                     [&](int32_t row) { return table.born[row] >= 0; });
      const int64_t victims = std::count_if(table.order.begin(), table.order.begin() + kNew,
                                            [&](int32_t row) { return table.born[row] >= 0; });
      for (int64_t& id : table.new_ids) id = static_cast<int64_t>(random() >> 1);
      changes.push_back({&table.map, table.ids.data(), table.born.data(), table.counts.data(),
                         table.powers.data(), table.order.data(), victims, table.evicted.data(),
                         table.new_ids.data(), table.order.data(), kNew, table.rows.data(),
                         positions.data(), positions.data(), kNew, table.order.data()});
    }
    if (batch == 19) tables[1].new_ids[5] = kNoId;
    require(commit(changes.data(), 2, batch, 5) == (batch == 19 ? 1 : 2), "commit");
    for (Table& table : tables) {
      if (batch == 19 && &table == &tables[1]) break;
      std::vector<int32_t> slots(kNew);
      table.map.find(table.new_ids.data(), kNew, slots.data());
      require(std::equal(slots.begin(), slots.end(), table.order.begin()), "new ids");
      require(slots == table.rows, "rows of the batch");
      const int64_t victims = changes[&table - tables.data()].num_victims;
      slots.assign(kNew, kNoSlot);
      table.map.find(table.evicted.data(), victims, slots.data());
      require(std::count(slots.begin(), slots.end(), kNoSlot) == kNew, "evicted ids");
      for (int64_t i = 0; i < kNew; ++i) {
        const int32_t row = table.order[i];
        require(table.ids[row] == table.new_ids[i] && table.born[row] == batch &&
                    table.counts[row] == 0 && table.powers[row] == 5, "records of new ids");
      }
    }
  }
}

// Two tables, one by its last uses and one by keys, and a third that a use does not fit.
void check_search(Random& random) {
  constexpr int64_t kRoom = 20000;
  struct Table {
    std::vector<int64_t> born = std::vector<int64_t>(kRoom), last_use = born;
    std::vector<uint32_t> counts = std::vector<uint32_t>(kRoom);
    std::vector<uint64_t> keys = std::vector<uint64_t>(kRoom);
    std::vector<int32_t> hits = std::vector<int32_t>(300), rows = hits, found = hits;
    std::vector<uint8_t> eligible = std::vector<uint8_t>(kRoom);
    Uses uses;
  };
  std::vector<Table> tables(3);
  std::vector<Search> searches;
  for (Table& table : tables) {
    for (int64_t& each : table.born) each = static_cast<int64_t>(random() % 3) - 1;
    for (int64_t& each : table.last_use) each = static_cast<int64_t>(random() % 9);
    for (uint64_t& key : table.keys) key = random();
    for (int32_t& row : table.hits) row = static_cast<int32_t>(random() % kRoom) - 1;
    for (int32_t& row : table.rows) row = static_cast<int32_t>(random() % kRoom) - 1;
    const bool is_first = &table == &tables[0];
    table.uses = {table.rows.data(), 300, 9};
    searches.push_back({table.born.data(), table.last_use.data(), table.counts.data(), kRoom,
                        &table.uses, 1, 7, table.hits.data(), 300,
                        is_first ? nullptr : table.keys.data(), 5, 300, table.found.data(), 0, 0,
                        is_first ? table.eligible.data() : nullptr});
  }
  tables[2].rows[4] = kRoom;
  require(search(searches.data(), 3) == 2, "a use of no row");
  require(search(searches.data(), 2) == 2, "searches");
  for (int64_t k = 0; k < 2; ++k) {
    Table& table = tables[k];
    for (int32_t row : table.rows) require(row < 0 || table.last_use[row] == 9, "recorded uses");
    std::vector<int32_t> expected;
    for (int32_t row = 0; row < kRoom; ++row) {
      const bool is_hit =
          std::find(table.hits.begin(), table.hits.end(), row) != table.hits.end();
      const bool is_eligible = table.born[row] >= 0 && table.last_use[row] < 7 && !is_hit;
      if (is_eligible) expected.push_back(row);
      require(k == 1 || table.eligible[row] == is_eligible, "eligible rows");
    }
    require(searches[k].num_eligible == static_cast<int64_t>(expected.size()), "their number");
    std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
      return k == 1 ? table.keys[a] < table.keys[b] : table.last_use[a] < table.last_use[b];
    });
    require(searches[k].num_found == 300, "number of rows found");
    require(std::equal(table.found.begin(), table.found.end(), expected.begin()), "rows found");
    searches[k].least = kRoom;
  }
  require(search(searches.data(), 2) == 2 && searches[1].num_found == 0, "too few eligible rows");
}

void check_evictions() {
  std::vector<int64_t> last(100), found_sizes(2);
  const std::vector<int64_t> first = {7, 3, 50}, second = {3, 99}, wanted = {99, 3, -1, 7, 8};
  const std::vector<int64_t> both = {1, 2}, later = {2};
  Evictions added = {last.data(), first.data(), 3, nullptr, 0, 1};
  add_evictions(&added, 1);
  added = {last.data(), second.data(), 2, nullptr, 0, 2};
  add_evictions(&added, 1);
  const Evictions tables[] = {{last.data(), wanted.data(), 5, later.data(), 1, 0},
                              {last.data(), wanted.data(), 5, both.data(), 2, 0}};
  std::vector<int32_t> which(10), index(10), positions(10);
  find_evictions(tables, 2, which.data(), index.data(), positions.data(), found_sizes.data());
  require(found_sizes == std::vector<int64_t>({2, 3}), "numbers of evicted ids");
  which.resize(5), index.resize(5), positions.resize(5);
  require(which == std::vector<int32_t>({0, 0, 1, 1, 0}), "their evictions");
  require(index == std::vector<int32_t>({1, 0, 1, 0, 0}), "their indices");
  require(positions == std::vector<int32_t>({0, 1, 0, 1, 3}), "their positions");
}

void check_rows(int64_t width, Random& random) {
  constexpr int64_t kRoom = 300;
  std::vector<int32_t> places(kRoom);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), random);
  std::vector<uint8_t> rows(kRoom * width), array(rows.size()), same(rows.size());
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random());
  const Rows taken = {array.data(), places.data(), width, kRoom, same.data()};
  // The first byte of each record apart from the others.
  std::vector<uint8_t> heads(kRoom), tails(rows.size());
  for (int64_t i = 0; i < kRoom; ++i) {
    heads[i] = rows[i * width];
    std::copy_n(rows.begin() + i * width + 1, width - 1, tails.begin() + i * (width - 1));
  }
  const Part parts[] = {{heads.data(), 1, 0}, {tails.data(), width - 1, 1}};
  put_rows({array.data(), width, places.data(), kRoom, parts, 2});
  take_rows(taken);
  require(rows == same, "rows of an array");
  const int32_t place = std::exchange(places[7], -1);
  take_rows(taken);
  std::fill_n(rows.begin() + 7 * width, width, 0);
  require(rows == same, "a row without a place");

  // Rows of two arrays, in turn, to shuffled places.
  const Part sources[] = {{array.data(), width, 0}, {rows.data(), width, 0}};
  std::vector<int32_t> which(kRoom), index(kRoom);
  for (int32_t i = 0; i < kRoom; ++i) {
    which[i] = i % 2;
    index[i] = static_cast<int32_t>(random() % kRoom);
  }
  places[7] = place;
  std::vector<uint8_t> copied(rows.size());
  copy_rows(sources, 1, which.data(), index.data(), width, places.data(), kRoom, copied.data());
  for (int64_t i = 0; i < kRoom; ++i) {
    require(std::equal(copied.begin() + places[i] * width, copied.begin() + (places[i] + 1) * width,
                       sources[which[i]].bytes + index[i] * width),
            "a row of several arrays");
  }
}

void check_fingerprint() {
  const uint64_t most = ~uint64_t{0}, some[] = {most, 5, 3};
  const uint64_t* const lists[] = {some, some};
  const int64_t counts[] = {0, 3};
  uint64_t sums[4];
  fingerprint(lists, counts, 2, sums);
  require(sums[0] == 0 && sums[1] == 0 && sums[2] == 7 && sums[3] == (most ^ 6), "fingerprint");
}

}  // namespace

int main() {
  Random random(7);
  for (Shape shape : {kSpread, kSequential, kOneHome, kRange}) {
    for (int64_t capacity : {0, 1, 2, 3, 4, 5, 7, 8, 10, 14, 20, 50, 200}) {
      for (int round = 0; round < 5; ++round) check_program(capacity, shape, random);
    }
  }
  check_threads(0);
  check_threads(4 * 40000);
  for (int64_t count : {0, 1, 4096, 30000}) {
    for (uint64_t num_ids : {1u, 100u, 4000000000u}) check_distinct(count, num_ids, random);
  }
  for (int kind = 0; kind < 5; ++kind) {
    for (int64_t k : {0, 1, 700}) check_smallest(1000, k, kind, random);
    for (int64_t k : {10, 9000, 190000}) check_smallest(200000, k, kind, random);
  }
  check_record_uses();
  check_look_up(random);
  check_commit(random);
  check_search(random);
  check_evictions();
  check_fingerprint();
  for (int64_t width : {1, 64, 260}) check_rows(width, random);
  for (int64_t width : {1, 8, 13, 260}) {
    for (bool has_id : {true, false}) check_records(width, has_id, random);
  }
  std::printf("native id maps and records agree\n");
}
