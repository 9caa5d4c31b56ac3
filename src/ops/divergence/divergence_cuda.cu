// divergence on a GPU. The first pass computes each lse and a KL divergence; a second pass computes a divergence that
// needs both lse first; the last pass writes the gradient. A pass reads the student's and the teacher's row side by
// side, one block per piece of a row, and is bound by memory alone. The gradient of an lse alone does not need the
// teacher.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "core/dispatch.h"
#include "core/softmax_state.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"
#include "ops/cross_entropy/cross_entropy_transform.cuh"
#include "ops/divergence/divergence.h"

namespace eaves::cuda {
namespace {

// ---- policy ---------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kVectors = 4;             // groups of four columns per row that a thread loads before it uses the first
constexpr int kColumns = 4 * kVectors;  // columns of a thread per batch
constexpr std::int64_t kBatch = std::int64_t{kThreads} * kColumns;
/// Columns of a block. The number of rows does not change them, so no row's result depends on the other rows.
constexpr std::int64_t kPiece = 4 * kBatch;
constexpr int kBlocks = 3;  // resident blocks per multiprocessor, which bounds a thread's registers

// ---- arguments of kernels -------------------------------------------------------------------------------------------

/// tanh_and_derivative(), with a relative error of 3e-7 for small x too.
__device__ TanhAndDerivative exact_tanh(float x) {
  TanhAndDerivative found = tanh_and_derivative(x);
  const float square = x * x;
  float slope = tanh_coefficient(kTanhDegree);
#pragma unroll
  for (int i = kTanhDegree - 1; i >= 0; --i) slope = fmaf(slope, square, tanh_coefficient(i));
  if (fabsf(x) <= kSmallTanh) found.tanh = x * slope;
  return found;
}

struct Logit {
  float value;  ///< before the division by the temperature
  float slope;  ///< d(logit) / d(value in memory), for a value that is no probability
};

struct Side {
  const void* values;
  std::int64_t stride;
  const float* bias;  ///< nullptr: 0
  float scale;
  float softcap;  ///< 0: none
  float to_tanh;  ///< scale / softcap
  bool holds_probabilities;
  bool is_plain;  ///< only the scale applies: no bias, no soft cap, no probabilities

  explicit Side(const Distribution& of)
      : values(of.values.data),
        stride(of.values.strides[0]),
        bias(static_cast<const float*>(of.bias.data)),
        scale(static_cast<float>(of.scale)),
        softcap(static_cast<float>(of.softcap)),
        to_tanh(of.softcap == 0.0 ? 0.0f : static_cast<float>(of.scale / of.softcap)),
        holds_probabilities(of.holds_probabilities),
        is_plain(bias == nullptr && softcap == 0.0f && !holds_probabilities) {}

  template <typename T>
  __device__ const T* row(std::int64_t index) const {
    return static_cast<const T*>(values) + index * stride;
  }

  template <bool kIsPlain = false>
  __device__ Logit logit(float value, std::int64_t column) const {
    if constexpr (kIsPlain) return {scale * value, scale};
    if (holds_probabilities) value = logf(value);
    if (bias != nullptr) value += bias[column];
    if (softcap == 0.0f) return {scale * value, scale};
    const TanhAndDerivative tanh = exact_tanh(to_tanh * value);
    return {softcap * tanh.tanh, scale * tanh.derivative};
  }
};

struct Number {
  const float* values;
  std::int64_t stride;
  float constant;

  explicit Number(const RowNumber& of)
      : values(static_cast<const float*>(of.values.data)),
        stride(of.values.is_present ? of.values.strides[0] : 0),
        constant(static_cast<float>(of.constant)) {}
  __device__ float of(std::int64_t row) const { return values == nullptr ? constant : values[row * stride]; }
};

struct Inputs {
  Side student;
  Side teacher;
  std::int64_t rows;
  std::int64_t classes;
  std::int64_t pieces;  ///< of a row
  Number temperature;
  Divergence divergence;
  float beta;
  const std::int64_t* targets;
  std::int64_t target_stride;

  explicit Inputs(const DivergenceInputs& of)
      : student(of.student),
        teacher(of.teacher),
        rows(of.student.values.shape[0]),
        classes(of.student.values.shape[1]),
        pieces(std::max<std::int64_t>(1, ceil_divide(classes, kPiece))),
        temperature(of.temperature),
        divergence(of.divergence),
        beta(static_cast<float>(of.beta)),
        targets(static_cast<const std::int64_t*>(of.targets.data)),
        target_stride(of.targets.is_present ? of.targets.strides[0] : 0) {}

  __device__ std::int64_t target(std::int64_t row) const { return targets[row * target_stride]; }
};

/// The row and the columns of a block.
struct Piece {
  std::int64_t row;
  std::int64_t index;
  std::int64_t first;
  std::int64_t last;

  __device__ explicit Piece(const Inputs& in)
      : row(blockIdx.x / in.pieces),
        index(blockIdx.x % in.pieces),
        first(index * kPiece),
        last(min(first + kPiece, in.classes)) {}
};

// ---- loads and stores -----------------------------------------------------------------------------------------------

/// Column i of a thread in the batch that begins with column `first`. A vector has four adjacent columns. Rows that do
/// not begin on a vector are read one column at a time, adjacent columns by adjacent threads.
template <bool kHasVectors>
__device__ std::int64_t column_of(std::int64_t first, int i) {
  if constexpr (kHasVectors) return first + (i / 4 * kThreads + threadIdx.x) * 4 + i % 4;
  return first + std::int64_t{i} * kThreads + threadIdx.x;
}

/// Values beyond the last column are 0. kIsOverwritten: the thread later writes over the values that it loads.
template <bool kHasVectors, bool kIsOverwritten = false, typename T>
__device__ void load(const T* row, std::int64_t first, std::int64_t last, float (&values)[kColumns]) {
  if constexpr (!kHasVectors) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const std::int64_t column = column_of<false>(first, i);
      values[i] = column < last ? load_as_accumulator(row[column]) : 0.0f;
    }
  } else if constexpr (std::is_same_v<T, float>) {
    Vector<float> vectors[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t column = column_of<true>(first, 4 * v);
      const auto* from = reinterpret_cast<const Vector<float>*>(row + column);
      vectors[v] = Vector<float>{make_uint4(0, 0, 0, 0)};
      if (column < last) vectors[v] = kIsOverwritten ? load_before_overwriting(from) : load_past_l1(from);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = __uint_as_float((&vectors[i / 4].words.x)[i % 4]);
  } else {
    uint2 words[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t column = column_of<true>(first, 4 * v);
      words[v] = column < last ? __ldcs(reinterpret_cast<const uint2*>(row + column)) : make_uint2(0, 0);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float unpacked[8];
      unpack(Vector<T>{make_uint4(words[v].x, words[v].y, 0, 0)}, unpacked);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * v + i] = unpacked[i];
    }
  }
}

template <bool kHasVectors, typename T>
__device__ void store(T* row, std::int64_t first, std::int64_t last, const float (&values)[kColumns]) {
  if constexpr (kHasVectors) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t column = column_of<true>(first, 4 * v);
      if (column >= last) continue;
      const float four[4] = {values[4 * v], values[4 * v + 1], values[4 * v + 2], values[4 * v + 3]};
      if constexpr (std::is_same_v<T, float>) {
        *reinterpret_cast<Vector<float>*>(row + column) = pack<float>(four);
      } else {
        store_narrow(row + column, pack<float>(four));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const std::int64_t column = column_of<false>(first, i);
      if (column < last) row[column] = round_to<T>(values[i]);
    }
  }
}

/// The logits of a batch, from its values; -inf beyond the last column.
template <bool kHasVectors>
__device__ void to_logits(const Side& side, std::int64_t first, std::int64_t last, float (&values)[kColumns]) {
  if (side.is_plain) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = side.logit<true>(values[i], 0).value;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = side.logit(values[i], min(column_of<kHasVectors>(first, i), last - 1)).value;
    }
  }
  if (first + kBatch <= last) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column_of<kHasVectors>(first, i) >= last) values[i] = -infinity<float>();
  }
}

// ---- probabilities --------------------------------------------------------------------------------------------------

// product() of cross_entropy_transform.cuh is rounded by itself, so that equal rows have differences of exactly 0.

/// p * number; 0 for p = 0 and any number.
__device__ float weighted(float p, float number) { return p == 0.0f ? 0.0f : p * number; }

struct Lse {
  float largest;
  float log_sum;

  __device__ float log_probability(float logit, float per_temperature) const {
    return (product(logit, per_temperature) - largest) - log_sum;
  }
};

/// The summand of one class, and s * f' without a constant in f'.
struct Term {
  float divergence;
  float weighted;
};

/// For a divergence with terms that need both lse.
__device__ Term term_of(Divergence divergence, float beta, float log_s, float log_t, float s, float t) {
  if (divergence == Divergence::total_variation) {
    const float difference = s - t;
    const float sign = difference > 0.0f ? 0.5f : difference < 0.0f ? -0.5f : difference;  // a NaN stays NaN
    return {0.5f * fabsf(difference), sign * s};
  }
  // u = log m - max(log s, log t)
  const float d = log_t - log_s;
  const float x = (d > 0.0f ? 1.0f - beta : beta) * (exponential(-fabsf(d)) - 1.0f);
  const float u = x == 0.0f ? 0.0f : __logf(1.0f + x);
  const float of_student = weighted(s, -(1.0f - beta) * (fmaxf(d, 0.0f) + u));
  return {fmaf(beta, weighted(t, fminf(d, 0.0f) - u), of_student), of_student};
}

// ---- reductions -----------------------------------------------------------------------------------------------------

/// All sums are over exp(z - largest z), with the anchors of SoftmaxState. The largest logits are not divided by the
/// temperature.
struct KlState {
  float student_largest = -infinity<float>();
  float teacher_largest = -infinity<float>();
  float student_sum = 0.0f;
  float teacher_sum = 0.0f;
  float divergence = 0.0f;            ///< KL(p || q): sum of exp(z_p) * (z_p - z_q), each z minus its largest
  float entropy = 0.0f;               ///< sum of exp(z) * z of the student, z minus its largest
  float hard_sum = 0.0f;              ///< sum of the student's exponentials at temperature 1
  float target = -infinity<float>();  ///< the target's logit
};

/// One pass over both rows: each lse, KL(t || s) or KL(s || t), the entropy of s and the hard loss.
struct KlReduction {
  using State = KlState;
  static constexpr bool kIsFirst = true;

  bool is_reverse;
  float per_temperature;

  __device__ KlReduction(const Inputs& in, const float*, std::int64_t row)
      : is_reverse(in.divergence == Divergence::reverse), per_temperature(1.0f / in.temperature.of(row)) {}

  __device__ void raise(State& state, float student, float teacher) const {
    if (state.student_largest == student && state.teacher_largest == teacher) return;
    const float of_student = step(state.student_largest, student, per_temperature);
    const float of_teacher = step(state.teacher_largest, teacher, per_temperature);
    const float moved_student = move(state.student_largest, student);
    const float moved_teacher = move(state.teacher_largest, teacher);
    const float sum = is_reverse ? -state.student_sum : state.teacher_sum;
    state.divergence =
        weighted(is_reverse ? of_student : of_teacher, fmaf(sum, moved_teacher - moved_student, state.divergence));
    state.entropy = weighted(of_student, fmaf(state.student_sum, moved_student, state.entropy));
    if (per_temperature != 1.0f) state.hard_sum *= step(state.student_largest, student, 1.0f);
    state.student_sum *= of_student;
    state.teacher_sum *= of_teacher;
    state.student_largest = student;
    state.teacher_largest = teacher;
  }

  __device__ State operator()(State a, State b) const {
    const float student = fmaxf(a.student_largest, b.student_largest);
    const float teacher = fmaxf(a.teacher_largest, b.teacher_largest);
    raise(a, student, teacher);
    raise(b, student, teacher);
    return {student,
            teacher,
            a.student_sum + b.student_sum,
            a.teacher_sum + b.teacher_sum,
            a.divergence + b.divergence,
            a.entropy + b.entropy,
            a.hard_sum + b.hard_sum,
            fmaxf(a.target, b.target)};
  }

  __device__ void add(State& state, const float (&student)[kColumns], const float (&teacher)[kColumns]) const {
    float largest_student = state.student_largest;
    float largest_teacher = state.teacher_largest;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      largest_student = fmaxf(largest_student, student[i]);
      largest_teacher = fmaxf(largest_teacher, teacher[i]);
    }
    raise(state, largest_student, largest_teacher);
    const float anchor_student = softmax_anchor(largest_student);
    const float anchor_teacher = softmax_anchor(largest_teacher);
    State batch;
#pragma unroll  // no branch in the loop
    for (int i = 0; i < kColumns; ++i) {
      const float z_student = product(student[i] - anchor_student, per_temperature);
      const float z_teacher = product(teacher[i] - anchor_teacher, per_temperature);
      const float s = exponential(z_student);
      const float t = exponential(z_teacher);
      batch.student_sum += s;
      batch.teacher_sum += t;
      batch.divergence += weighted(is_reverse ? s : t, z_teacher - z_student);
      batch.entropy += weighted(s, z_student);
    }
    if (per_temperature != 1.0f) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) batch.hard_sum += exponential(student[i] - anchor_student);
    }
    state.student_sum += batch.student_sum;
    state.teacher_sum += batch.teacher_sum;
    state.divergence += is_reverse ? -batch.divergence : batch.divergence;
    state.entropy += batch.entropy;
    state.hard_sum += batch.hard_sum;
  }

  /// Called once for each row, with the logit of its target.
  __device__ void add_target(State& state, float logit) const { state.target = logit; }

  __device__ void finish(const Inputs& in, std::int64_t row, const State& state, float* to) const {
    const auto write = [&](DivergenceStatistic which, int i, float number) { to[int(which) + i] = number; };
    const float log_student = logf(state.student_sum);
    const float log_teacher = logf(state.teacher_sum);
    const float anchor = softmax_anchor(state.student_largest);
    write(DivergenceStatistic::lse, 0, product(anchor, per_temperature));
    write(DivergenceStatistic::lse, 1, log_student);
    write(DivergenceStatistic::teacher_lse, 0, product(softmax_anchor(state.teacher_largest), per_temperature));
    write(DivergenceStatistic::teacher_lse, 1, log_teacher);
    const float divergence = is_reverse ? state.divergence / state.student_sum + (log_teacher - log_student)
                                        : state.divergence / state.teacher_sum + (log_student - log_teacher);
    write(DivergenceStatistic::divergence, 0, divergence < 0.0f ? 0.0f : divergence);  // a NaN stays
    // The centre of `forward` is -sum t = -1. A computed sum has roundings, which would give two equal rows a gradient.
    write(DivergenceStatistic::centre, 0, is_reverse ? divergence : -1.0f);
    write(DivergenceStatistic::entropy, 0, log_student - state.entropy / state.student_sum);
    const float hard_log_sum = per_temperature == 1.0f ? log_student : logf(state.hard_sum);
    const bool has_target = in.targets != nullptr && in.target(row) >= 0 && in.target(row) < in.classes;
    write(DivergenceStatistic::hard_lse, 0, anchor);
    write(DivergenceStatistic::hard_lse, 1, hard_log_sum);
    write(DivergenceStatistic::hard_loss, 0, has_target ? (anchor - state.target) + hard_log_sum : nan_of<float>());
  }

 private:
  /// move(): the change of the anchor of z. step(): the factor of the exponentials for that change.
  __device__ float move(float from, float to) const {
    return product(softmax_anchor(from) - softmax_anchor(to), per_temperature);
  }
  static __device__ float step(float from, float to, float per_temperature) {
    return from == to ? 1.0f : exponential((from - to) * per_temperature);
  }
};

/// A second pass over both rows with their lse: a divergence that is no KL divergence, and its centre.
struct TermReduction {
  struct State {
    float divergence = 0.0f;
    float centre = 0.0f;
  };
  static constexpr bool kIsFirst = false;

  Divergence divergence;
  float beta;
  float per_temperature;
  Lse student_lse;
  Lse teacher_lse;

  __device__ TermReduction(const Inputs& in, const float* statistics, std::int64_t row)
      : divergence(in.divergence), beta(in.beta), per_temperature(1.0f / in.temperature.of(row)) {
    const auto lse = [&](DivergenceStatistic which) { return Lse{statistics[int(which)], statistics[int(which) + 1]}; };
    student_lse = lse(DivergenceStatistic::lse);
    teacher_lse = lse(DivergenceStatistic::teacher_lse);
  }

  __device__ State operator()(const State& a, const State& b) const {
    return {a.divergence + b.divergence, a.centre + b.centre};
  }

  __device__ void add(State& state, const float (&student)[kColumns], const float (&teacher)[kColumns]) const {
    State batch;
    const auto add_each = [&](Divergence which) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float log_s = student_lse.log_probability(student[i], per_temperature);
        const float log_t = teacher_lse.log_probability(teacher[i], per_temperature);
        const Term term = term_of(which, beta, log_s, log_t, exponential(log_s), exponential(log_t));
        batch.divergence += term.divergence;
        batch.centre += term.weighted;
      }
    };
    // One loop per divergence, so that no column has a branch.
    divergence == Divergence::jsd ? add_each(Divergence::jsd) : add_each(Divergence::total_variation);
    state = (*this)(state, batch);
  }

  __device__ void add_target(State&, float) const {}

  __device__ void finish(const Inputs&, std::int64_t, const State& state, float* to) const {
    to[int(DivergenceStatistic::divergence)] = state.divergence < 0.0f ? 0.0f : state.divergence;
    to[int(DivergenceStatistic::centre)] = state.centre;
  }
};

/// `states` is [pieces, rows]; unused if a row has one piece. T is the teacher's type.
template <typename Reduction, typename T, bool kHasVectors>
__global__ void __launch_bounds__(kThreads, kBlocks)
    reduce_pieces_of_rows(const __grid_constant__ Inputs in, float* statistics, typename Reduction::State* states) {
  const Piece piece(in);
  float* const to = statistics + piece.row * kDivergenceStatistics;
  const Reduction reduction(in, to, piece.row);
  const float* const student = in.student.row<float>(piece.row);
  const T* const teacher = in.teacher.row<T>(piece.row);
  typename Reduction::State state;
  for (std::int64_t first = piece.first; first < piece.last; first += kBatch) {
    float of_student[kColumns];
    float of_teacher[kColumns];
    load<kHasVectors>(student, first, piece.last, of_student);
    load<kHasVectors>(teacher, first, piece.last, of_teacher);
    to_logits<kHasVectors>(in.student, first, piece.last, of_student);
    to_logits<kHasVectors>(in.teacher, first, piece.last, of_teacher);
    reduction.add(state, of_student, of_teacher);
  }
  if (Reduction::kIsFirst && threadIdx.x == 0 && in.targets != nullptr) {
    const std::int64_t target = in.target(piece.row);
    if (target >= piece.first && target < piece.last) {
      reduction.add_target(state, in.student.logit(student[target], target).value);
    }
  }
  state = reduce_block<kThreads>(state, reduction);
  if (threadIdx.x != 0) return;
  if (in.pieces == 1) return reduction.finish(in, piece.row, state, to);
  states[piece.index * in.rows + piece.row] = state;
}

/// One thread per row.
template <typename Reduction>
__global__ void __launch_bounds__(kThreads) merge_pieces_of_rows(const __grid_constant__ Inputs in, float* statistics,
                                                                 const typename Reduction::State* states) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  float* const to = statistics + row * kDivergenceStatistics;
  const Reduction reduction(in, to, row);
  typename Reduction::State state;
#pragma unroll 4
  for (std::int64_t piece = 0; piece < in.pieces; ++piece) state = reduction(state, states[piece * in.rows + row]);
  reduction.finish(in, row, state, to);
}

// ---- the gradient ---------------------------------------------------------------------------------------------------

struct Gradient {
  Inputs inputs;
  const float* lse;
  const float* teacher_lse;
  const float* hard_lse;
  std::int64_t lse_stride;
  std::int64_t teacher_lse_stride;
  std::int64_t hard_lse_stride;
  Number centre;
  Number entropy;
  Number hard_loss;
  Number grad_divergence;
  Number grad_lse;
  Number grad_entropy;
  Number grad_hard_loss;
  void* to;
  DType dtype;
  std::int64_t stride;

  explicit Gradient(const DivergenceBackwardArgs& args)
      : inputs(args.inputs),
        lse(static_cast<const float*>(args.lse.data)),
        teacher_lse(static_cast<const float*>(args.teacher_lse.data)),
        hard_lse(static_cast<const float*>(args.hard_lse.data)),
        lse_stride(args.lse.strides[0]),
        teacher_lse_stride(args.teacher_lse.strides[0]),
        hard_lse_stride(args.hard_lse.is_present ? args.hard_lse.strides[0] : 0),
        centre(args.centre),
        entropy(args.entropy),
        hard_loss(args.hard_loss),
        grad_divergence(args.grad_divergence),
        grad_lse(args.grad_lse),
        grad_entropy(args.grad_entropy),
        grad_hard_loss(args.grad_hard_loss),
        to(args.grad_values.data),
        dtype(args.grad_values.dtype),
        stride(args.grad_values.strides[0]) {}
};

/// The upstream gradients of a row that are not 0. Both sides are plain, except for `any`.
enum class Terms { divergence, divergence_and_hard_loss, lse, any };

/// The gradient of the student's values in a row.
struct RowGradient {
  const Inputs& in;
  float per_temperature;
  Lse lse;
  Lse teacher_lse;
  Lse hard_lse;
  float centre;
  float entropy;
  float grad_divergence;
  float grad_lse;
  float grad_entropy;
  float grad_hard_loss;
  float of_target;  ///< p - 1 of the target, computed without cancellation
  std::int64_t target = -1;
  Terms terms;

  __device__ RowGradient(const Gradient& of, std::int64_t row)
      : in(of.inputs),
        per_temperature(1.0f / of.inputs.temperature.of(row)),
        lse(lse_at(of.lse + row * of.lse_stride)),
        teacher_lse(lse_at(of.teacher_lse + row * of.teacher_lse_stride)),
        centre(of.centre.of(row)),
        entropy(of.entropy.of(row)),
        grad_divergence(of.grad_divergence.of(row)),
        grad_lse(of.grad_lse.of(row)),
        grad_entropy(of.grad_entropy.of(row)),
        grad_hard_loss(in.targets == nullptr ? 0.0f : of.grad_hard_loss.of(row)),
        terms(find_terms()) {
    if (grad_hard_loss == 0.0f) return;
    hard_lse = lse_at(of.hard_lse + row * of.hard_lse_stride);
    of_target = expm1f(-of.hard_loss.of(row));
    target = in.target(row);
  }

  __device__ bool is_zero() const {
    return grad_divergence == 0.0f && grad_lse == 0.0f && grad_entropy == 0.0f && grad_hard_loss == 0.0f;
  }

  template <Terms kTerms>
  __device__ float of_value(float student, float teacher, std::int64_t column, Divergence divergence) const {
    constexpr bool kIsAny = kTerms == Terms::any;
    constexpr bool kHasHardLoss = kTerms == Terms::divergence_and_hard_loss;
    const Logit logit = in.student.logit<!kIsAny>(student, column);
    const float log_s = lse.log_probability(logit.value, per_temperature);
    const float s = exponential(log_s);
    float of_z = 0.0f;
    if (kTerms == Terms::divergence || kHasHardLoss || (kIsAny && grad_divergence != 0.0f)) {
      const float teacher_logit = in.teacher.logit<!kIsAny>(teacher, column).value;
      const float log_t = teacher_lse.log_probability(teacher_logit, per_temperature);
      const float t = exponential(log_t);
      const float product = divergence == Divergence::forward ? -t
                            : divergence == Divergence::reverse
                                ? weighted(s, log_s - log_t)
                                : term_of(divergence, in.beta, log_s, log_t, s, t).weighted;
      of_z = grad_divergence * fmaf(-centre, s, product);
    }
    if (kTerms == Terms::lse || (kIsAny && grad_lse != 0.0f)) of_z = fmaf(grad_lse, s, of_z);
    if (kIsAny && grad_entropy != 0.0f) of_z -= grad_entropy * weighted(s, log_s + entropy);
    of_z *= per_temperature;
    if (kHasHardLoss || (kIsAny && grad_hard_loss != 0.0f)) {
      of_z +=
          grad_hard_loss * (column == target ? of_target : exponential(hard_lse.log_probability(logit.value, 1.0f)));
    }
    return of_z * logit.slope;
  }

  /// Replaces the student's values of a batch by their gradient.
  template <bool kHasVectors>
  __device__ void write(float (&student)[kColumns], const float (&teacher)[kColumns], std::int64_t first,
                        std::int64_t last) const {
    const auto write_each = [&]<Terms kTerms>(Divergence divergence) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const std::int64_t column = min(column_of<kHasVectors>(first, i), last - 1);
        student[i] = of_value<kTerms>(student[i], teacher[i], column, divergence);
      }
    };
    // One loop per divergence, so that no column has a branch.
    const auto write_divergence = [&]<Terms kTerms>() {
      if (in.divergence == Divergence::forward) return write_each.template operator()<kTerms>(Divergence::forward);
      if (in.divergence == Divergence::reverse) return write_each.template operator()<kTerms>(Divergence::reverse);
      if (in.divergence == Divergence::jsd) return write_each.template operator()<kTerms>(Divergence::jsd);
      write_each.template operator()<kTerms>(Divergence::total_variation);
    };
    if (terms == Terms::divergence) return write_divergence.template operator()<Terms::divergence>();
    if (terms == Terms::lse) return write_each.template operator()<Terms::lse>(in.divergence);
    if (terms == Terms::any) return write_each.template operator()<Terms::any>(in.divergence);
    write_divergence.template operator()<Terms::divergence_and_hard_loss>();
  }

 private:
  __device__ Terms find_terms() const {
    if (!in.student.is_plain || !in.teacher.is_plain || grad_entropy != 0.0f) return Terms::any;
    if (grad_divergence == 0.0f) return grad_hard_loss == 0.0f ? Terms::lse : Terms::any;
    if (grad_lse != 0.0f) return Terms::any;
    return grad_hard_loss == 0.0f ? Terms::divergence : Terms::divergence_and_hard_loss;
  }

  static __device__ Lse lse_at(const float* numbers) { return {numbers[0], numbers[1]}; }
};

/// T is the teacher's type.
template <typename T, bool kHasVectors>
__global__ void __launch_bounds__(kThreads, kBlocks) write_gradient(const __grid_constant__ Gradient gradient) {
  const Inputs& in = gradient.inputs;
  const Piece piece(in);
  const RowGradient of_row(gradient, piece.row);
  const float* const student = in.student.row<float>(piece.row);
  const T* const teacher = in.teacher.row<T>(piece.row);
  const bool is_zero = of_row.is_zero();
  for (std::int64_t first = piece.first; first < piece.last; first += kBatch) {
    float values[kColumns] = {};
    if (!is_zero) {
      float of_teacher[kColumns] = {};
      load<kHasVectors, true>(student, first, piece.last, values);
      if (of_row.grad_divergence != 0.0f) load<kHasVectors>(teacher, first, piece.last, of_teacher);
      of_row.write<kHasVectors>(values, of_teacher, first, piece.last);
    }
    const auto store_as = [&]<typename G>(G* to) {
      store<kHasVectors>(to + piece.row * gradient.stride, first, piece.last, values);
    };
    if (gradient.dtype == DType::bfloat16) {
      store_as(static_cast<bfloat16*>(gradient.to));
    } else if (gradient.dtype == DType::float16) {
      store_as(static_cast<float16*>(gradient.to));
    } else {
      store_as(static_cast<float*>(gradient.to));
    }
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

/// True if the vectors of four columns are aligned in every row.
bool has_vectors(const TensorView& matrix) {
  const std::size_t bytes = 4 * size_of(matrix.dtype);
  return matrix.shape[1] % 4 == 0 && matrix.strides[0] % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix.data) % bytes == 0;
}

/// Calls `run` with the teacher's type, and with whether all matrices have vectors.
template <typename Run>
void dispatch(const DivergenceInputs& inputs, bool vectors, Run run) {
  const bool all_vectors = vectors && has_vectors(inputs.student.values) && has_vectors(inputs.teacher.values);
  dispatch_floating_point(inputs.teacher.values.dtype, [&]<typename T>() {
    if constexpr (!std::is_same_v<T, double>) {
      all_vectors ? run.template operator()<T, true>() : run.template operator()<T, false>();
    }
  });
}

template <typename Reduction>
void reduce(const DivergenceForwardArgs& args, const ExecutionContext& context) {
  constexpr const char* kOp = "divergence_forward";
  const Inputs in(args.inputs);
  auto* const statistics = static_cast<float*>(args.statistics.data);
  auto* const states = static_cast<typename Reduction::State*>(context.workspace.data);
  dispatch(args.inputs, true, [&]<typename T, bool kHasVectors>() {
    launch(kOp, reduce_pieces_of_rows<Reduction, T, kHasVectors>,
           {.blocks = in.rows * in.pieces, .threads = kThreads, .stream = context.stream}, in, statistics, states);
  });
  if (in.pieces == 1) return;
  launch(kOp, merge_pieces_of_rows<Reduction>,
         {.blocks = ceil_divide(in.rows, kThreads), .threads = kThreads, .stream = context.stream}, in, statistics,
         static_cast<const typename Reduction::State*>(states));
}

}  // namespace

std::size_t divergence_workspace_bytes(std::int64_t rows, std::int64_t classes) {
  const std::int64_t pieces = ceil_divide(classes, kPiece);
  return pieces <= 1 ? 0 : static_cast<std::size_t>(pieces * rows) * sizeof(KlState);
}

void divergence_forward(const DivergenceForwardArgs& args, const ExecutionContext& context) {
  const DeviceGuard guard(args.inputs.student.values.device);
  reduce<KlReduction>(args, context);
  const Divergence divergence = args.inputs.divergence;
  if (divergence == Divergence::jsd || divergence == Divergence::total_variation) reduce<TermReduction>(args, context);
}

void divergence_backward(const DivergenceBackwardArgs& args, const ExecutionContext& context) {
  const DeviceGuard guard(args.inputs.student.values.device);
  const Gradient gradient(args);
  dispatch(args.inputs, has_vectors(args.grad_values), [&]<typename T, bool kHasVectors>() {
    launch("divergence_backward", write_gradient<T, kHasVectors>,
           {.blocks = gradient.inputs.rows * gradient.inputs.pieces, .threads = kThreads, .stream = context.stream},
           gradient);
  });
}

}  // namespace eaves::cuda
