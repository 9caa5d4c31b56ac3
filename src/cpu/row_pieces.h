// The division of a row operator's work: into groups of rows that are reduced together (one row, or a tile of rows side
// by side) and, if there are few groups, into pieces of their columns. It depends on the shape alone, never on the
// number of threads, and pieces are merged in order, so results do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/environment.h"
#include "core/numeric.h"
#include "cpu/parallel.h"
#include "eaves/context.h"

namespace eaves::cpu {

/// A piece of the columns of one group of rows.
struct ColumnPiece {
  std::int64_t group;
  std::int64_t begin;
  std::int64_t end;
};

/// The division of each group's columns into pieces. There are several pieces only if there are few groups, and never
/// with EAVES_BATCH_INVARIANT=1.
struct ColumnPieces {
  static constexpr std::int64_t kMaxTasks = 256;  // two for each thread of a large machine

  std::int64_t columns;
  std::int64_t groups;
  std::int64_t width;  ///< the most rows of a group
  std::int64_t size;   ///< columns of a piece; the last piece may have fewer
  std::int64_t count;  ///< pieces of each group

  ColumnPieces(std::int64_t columns, std::int64_t groups, std::int64_t width)
      : columns(columns), groups(groups), width(width), size(columns), count(1) {
    constexpr std::int64_t kSmallestPiece = 32768;  // elements; 5 us of work
    constexpr std::int64_t kMultiple = 64;          // pieces begin on a cache line if the row does
    const std::int64_t wanted = std::min(kMaxTasks / groups, columns * width / kSmallestPiece);
    if (wanted < 2 || is_batch_invariant()) return;
    // Rounded up, so that there are at most `wanted` pieces.
    size = ceil_divide(ceil_divide(columns, wanted), kMultiple) * kMultiple;
    count = ceil_divide(columns, size);
  }
  /// One piece for each row.
  static ColumnPieces of_whole_rows(std::int64_t columns, std::int64_t rows) {
    ColumnPieces pieces(columns, rows, 1);
    pieces.size = columns;
    pieces.count = 1;
    return pieces;
  }
  std::int64_t tasks() const { return groups * count; }
  std::int64_t grain() const { return grain_for(size * width); }
  ColumnPiece operator[](std::int64_t task) const {
    const std::int64_t begin = task % count * size;
    return {task / count, begin, std::min(columns, begin + size)};
  }
};

/// Reduces every group to `pieces.width` states, at most kMaxWidth. `reduce(piece, states)` computes the states of one
/// piece; `store(group, states)` takes the merged states of a group.
template <typename State, std::int64_t kMaxWidth, typename Reduce, typename Store>
void reduce_pieces(const ColumnPieces& pieces, const ExecutionContext& context, Reduce&& reduce, Store&& store) {
  if (pieces.count == 1) {
    parallel_for(context, pieces.groups, pieces.grain(), [&](std::int64_t begin, std::int64_t end) {
      State states[kMaxWidth];
      for (std::int64_t group = begin; group < end; ++group) {
        reduce(pieces[group], states);
        store(group, states);
      }
    });
    return;
  }
  // At most kMaxTasks * width states: 2 MiB for tiles of 512 rows.
  std::vector<State> states(static_cast<std::size_t>(pieces.tasks() * pieces.width));
  const auto states_of = [&](std::int64_t task) { return states.data() + task * pieces.width; };
  parallel_for(context, pieces.tasks(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) reduce(pieces[task], states_of(task));
  });
  for (std::int64_t group = 0; group < pieces.groups; ++group) {
    State* merged = states_of(group * pieces.count);
    for (std::int64_t piece = 1; piece < pieces.count; ++piece) {
      const State* other = states_of(group * pieces.count + piece);
      for (std::int64_t i = 0; i < pieces.width; ++i) merged[i] = merge(merged[i], other[i]);
    }
    store(group, merged);
  }
}

}  // namespace eaves::cpu
