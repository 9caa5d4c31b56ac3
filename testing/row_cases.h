// The rows for tests of reductions: across the memory, with strides of every kind, and with infinities and NaN.
#pragma once

#include <limits>
#include <vector>

#include "eaves/tensor.h"

namespace eaves::testing {

/// Rows along an axis that is not the last.
struct RowsAcross {
  Dims shape;
  int axis;
  const char* reason;
};

inline const std::vector<RowsAcross>& rows_across() {
  static const std::vector<RowsAcross> cases = {
      {{700, 1024}, 0, "whole tiles of 256 rows side by side"},
      {{513, 264}, 0, "vectors fit, the last tile is not full"},
      {{2048, 2052}, 0, "enough pieces of the widest tiles of a CPU's gradient, the last tile is thin"},
      {{300, 33}, 0, "no vector fits: 33 is odd"},
      {{40000, 40}, 0, "few rows: columns are cut into pieces"},
      {{5, 300, 520}, 1, "the middle axis, as PyTorch has classes"},
      {{3, 2, 1000, 72}, 2, "several outer axes"},
      {{2, 21, 30, 40}, 1, "an image: few classes, many pixels"},
      {{129, 1}, 0, "a single row"},
      {{2, 7, 3}, 1, "smaller than any tile"},
  };
  return cases;
}

struct StridedRows {
  Dims shape;
  Dims strides;
  int axis;
  const char* reason;
  bool has_gaps_only = true;  ///< every element has its own place, so that a gradient may lie there
};

inline const std::vector<StridedRows>& strided_rows() {
  static const std::vector<StridedRows> cases = {
      {{6, 100}, {128, 1}, 1, "rows of a wider tensor, aligned: x[:, :100]"},
      {{6, 100}, {101, 1}, 1, "rows of a wider tensor, each aligned differently"},
      {{6, 100}, {300, 3}, 1, "every third column"},
      {{6, 100}, {0, 1}, 1, "one row, expanded", false},
      {{6, 100}, {1, 0}, 1, "one column, expanded: lse = x + log(100)", false},
      {{6, 100}, {-100, 1}, 1, "rows in reverse order"},
      {{6, 100}, {100, -1}, 1, "columns in reverse order"},
      {{100, 64}, {80, 1}, 0, "columns of a wider tensor"},
      {{100, 64}, {-64, 1}, 0, "columns from the last row up"},
      {{4, 30, 8}, {8, 32, 1}, 2, "the first two axes swapped"},
      {{4, 30, 8}, {8, 32, 1}, 1, "the first two axes swapped, the second reduced"},
      {{3, 4100}, {8200, 2}, 1, "every second column, in several rounds"},
  };
  return cases;
}

/// A row that holds `first` and `second` once, side by side, and `others` everywhere else.
struct SpecialRow {
  double first, second, others;
  const char* reason;
};

inline const std::vector<SpecialRow>& special_rows() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  static const std::vector<SpecialRow> rows = {
      {-kInfinity, -kInfinity, -kInfinity, "all -inf: lse is -inf, its gradient 0; loss and its gradient are NaN"},
      {-kInfinity, -kInfinity, 0.5, "some -inf: p is 0 there, and a loss of their class infinite"},
      {0.25, 0.25, -kInfinity, "two finite elements among -inf"},
      {kInfinity, kInfinity, 0.5, "+inf: so is lse"},
      {kInfinity, kInfinity, kInfinity, "all +inf"},
      {kInfinity, -kInfinity, 0.5, "both infinities"},
      {kInfinity, -kInfinity, -kInfinity, "+inf among -inf"},
      {kNaN, kNaN, 0.5, "NaN: everything is, but the largest logit"},
      {kNaN, kNaN, kNaN, "all NaN"},
      {kNaN, kInfinity, 0.5, "NaN beside +inf"},
      {kInfinity, kNaN, -kInfinity, "in whichever order, whatever the others"},
      {kNaN, -kInfinity, -kInfinity, "NaN among -inf: the largest logit is the first -inf"},
  };
  return rows;
}

}  // namespace eaves::testing
