// The oracle: linear_cross_entropy and its gradients by the formulas of the header, in float64 loops, with all logits
// at once. The loss of the logits is the oracle of cross_entropy. It reads the operator's arguments in CPU memory,
// knows no backend, and stays slow and simple.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "eaves/linear_cross_entropy.h"
#include "testing/cross_entropy_reference.h"
#include "testing/reference.h"

namespace eaves::reference {

/// Row-major.
struct Matrix {
  Matrix(std::int64_t row_count, std::int64_t column_count)
      : rows(row_count), columns(column_count), values(static_cast<std::size_t>(row_count * column_count), 0.0) {}

  double& at(std::int64_t i, std::int64_t j) { return values[static_cast<std::size_t>(i * columns + j)]; }
  double at(std::int64_t i, std::int64_t j) const { return values[static_cast<std::size_t>(i * columns + j)]; }

  std::int64_t rows;
  std::int64_t columns;
  std::vector<double> values;
};

/// A tensor in CPU memory as a matrix, with its last axis as the columns.
inline Matrix matrix_of(const TensorView& view) {
  const int last = view.shape.size() - 1;
  const std::int64_t columns = view.shape[last];
  Matrix result(columns == 0 ? 0 : view.element_count() / columns, columns);
  for (std::int64_t i = 0; i < result.rows; ++i) {
    const std::vector<double> row = elements_along(view, last, i);
    for (std::int64_t j = 0; j < columns; ++j) result.at(i, j) = row[static_cast<std::size_t>(j)];
  }
  return result;
}

inline Matrix transposed(const Matrix& a) {
  Matrix result(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.columns; ++j) result.at(j, i) = a.at(i, j);
  }
  return result;
}

inline Matrix sizes_of(Matrix a) {
  for (double& value : a.values) value = std::abs(value);
  return a;
}

inline Matrix multiply(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t p = 0; p < a.columns; ++p) {
      for (std::int64_t j = 0; j < b.columns; ++j) result.at(i, j) += a.at(i, p) * b.at(p, j);
    }
  }
  return result;
}

/// The forward: the logits of each row, and their results by the oracle of cross_entropy.
struct LinearCrossEntropy {
  explicit LinearCrossEntropy(const LinearCrossEntropyInputs& inputs, const TensorView& normalizer = {})
      : hidden(matrix_of(inputs.hidden)), head(matrix_of(inputs.head)), options(inputs.options) {
    logits = multiply(hidden, transposed(head));
    for (std::int64_t i = 0; inputs.bias.is_present && i < logits.rows; ++i) {
      for (std::int64_t v = 0; v < logits.columns; ++v) logits.at(i, v) += element(inputs.bias, {v});
    }
    Dims shape = inputs.hidden.shape;
    shape[shape.size() - 1] = logits.columns;
    const CrossEntropyForwardArgs loss{.logits = TensorView::contiguous(logits.values.data(), DType::float64, shape),
                                       .targets = inputs.targets,
                                       .class_weight = inputs.class_weight,
                                       .row_weight = inputs.row_weight,
                                       .options = options};
    for (std::int64_t i = 0; i < logits.rows; ++i) {
      rows.push_back(cross_entropy_row(loss, i));
      if (rows.back().weight == 0.0) {  // left out, like an ignored row
        rows.back().is_counted = false;
        rows.back().target_mass = 0.0;
      }
      sums.add(rows.back(), options);
    }
    divisor = normalizer.is_present ? element(normalizer, 0) : static_cast<double>(sums.weight);
  }

  Matrix hidden;
  Matrix head;
  CrossEntropyOptions options;
  Matrix logits{0, 0};
  std::vector<CrossEntropyRow> rows;
  CrossEntropySums sums;
  double divisor = 0.0;
};

/// dL/d(each output of the forward), one number per row; `lse` and `entropy` may be empty.
struct LinearCrossEntropyUpstream {
  std::vector<double> loss;  ///< after the mean's division
  std::vector<double> lse = {};
  std::vector<double> entropy = {};
  bool has_split_lse = false;  ///< lse is not rounded
};

/// dL/d(logits), and the scale of each: see GradientTerms in testing/tolerance.h.
struct LogitsGradient {
  Matrix values;
  Matrix scales;
};

/// The logits come from a product and are rounded, as is an lse of one number.
inline LogitsGradient logits_gradient(const LinearCrossEntropy& forward, const LinearCrossEntropyUpstream& upstream) {
  LogitsGradient result{Matrix(forward.logits.rows, forward.logits.columns),
                        Matrix(forward.logits.rows, forward.logits.columns)};
  for (std::int64_t i = 0; i < forward.logits.rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const CrossEntropyRow& row = forward.rows[at];
    if (!row.is_counted) continue;
    const double rounding = (upstream.has_split_lse ? 0.0 : std::abs(row.lse)) + std::abs(row.max);
    const CrossEntropyGradient gradient =
        cross_entropy_gradient(row, forward.options,
                               {.loss = upstream.loss[at],
                                .lse_gradient = upstream.lse.empty() ? 0.0 : upstream.lse[at],
                                .entropy_gradient = upstream.entropy.empty() ? 0.0 : upstream.entropy[at],
                                .anchor = row.anchor,
                                .lse_minus_anchor = row.lse_minus_anchor,
                                .entropy = row.entropy,
                                .lse_rounding = std::isfinite(rounding) ? rounding : 0.0});
    for (std::int64_t v = 0; v < forward.logits.columns; ++v) {
      result.values.at(i, v) = gradient.values[static_cast<std::size_t>(v)];
      result.scales.at(i, v) = gradient.scales[static_cast<std::size_t>(v)];
    }
  }
  return result;
}

/// The rows that count. The other rows may hold anything.
inline Matrix counted_rows(const LinearCrossEntropy& forward, const Matrix& matrix) {
  Matrix result(0, matrix.columns);
  for (std::int64_t i = 0; i < matrix.rows; ++i) {
    if (!forward.rows[static_cast<std::size_t>(i)].is_counted) continue;
    ++result.rows;
    for (std::int64_t j = 0; j < matrix.columns; ++j) result.values.push_back(matrix.at(i, j));
  }
  return result;
}

}  // namespace eaves::reference
