// The common part of the kernels of exp_product.h: a product of CUTLASS, and the visitor that receives the accumulators
// in the epilogue. The kernels differ in the visitor's action. Multiplications and exponentials run at the same time:
// on Hopper one consumer warpgroup multiplies while the other takes the exponentials of its own tile, on Blackwell
// (10.x) tensor memory has the accumulators of two tiles. The kernels of Blackwell have been compiled, but not run.
#pragma once

#include <cuda_runtime.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <string>
#include <type_traits>

#include "cuda/cutlass/exp_product_kernels.h"
#include "cuda/error.cuh"
#include "cuda/exp_product.h"
#include "cuda/math.cuh"
#include "eaves/error.h"

namespace eaves::cuda {

namespace fusion = cutlass::epilogue::fusion;

// The two row tiles of a cluster share the loads of the weight.
using Cluster = cute::Shape<cute::Int<kExpProductClusterRows / kExpProductRows>, cute::_1, cute::_1>;
inline constexpr auto kRounding = cutlass::FloatRoundStyle::round_to_nearest;

// ---- tensor cores --------------------------------------------------------------------------------------------------

/// Four lanes share the columns of a row in a warp's accumulators. A thread has two of the 64 rows of an instruction.
struct Sm90 {
  using Architecture = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::Int<kExpProductRows>, cute::Int<kExpProductClasses>, cute::_64>;
  using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kLanesOfRow = 4;
  static constexpr int kRowsAtOnce = 64;  ///< rows of one part of the epilogue
  static constexpr int kRowsOfPart = 2;   ///< a thread's rows in one part
  static constexpr int kRowDistance = 8;  ///< of the two
  static constexpr bool kAlwaysStores = false;
};

/// The two multiprocessors of a cluster multiply together, and each has the accumulators of its own rows. A thread has
/// one row.
struct Sm100 {
  using Architecture = cutlass::arch::Sm100;
  using Tile = cute::Shape<cute::Int<kExpProductClusterRows>, cute::Int<kExpProductClasses>, cute::_64>;
  using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecialized2SmSm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized2Sm;
  static constexpr int kLanesOfRow = 1;
  static constexpr int kRowsAtOnce = static_cast<int>(kExpProductRows);
  static constexpr int kRowsOfPart = 1;
  static constexpr int kRowDistance = 1;
  static constexpr bool kAlwaysStores = true;  ///< CUTLASS' epilogue (version 4.2) has no way without a matrix
};

/// The rows of a thread in a tile.
template <typename Sm>
inline constexpr int kRowsOfThread = static_cast<int>(kExpProductRows) / (Sm::kRowsAtOnce / Sm::kRowsOfPart);

// ---- the end of a product ------------------------------------------------------------------------------------------

/// The rows whose accumulators a thread has.
template <typename Sm>
struct ThreadRows {
  std::int64_t first;       ///< index of the thread's first row in the product
  std::int64_t count;       ///< rows of the product; the thread's rows may lie beyond them
  std::int64_t class_tile;  ///< index of the tile of classes

  CUTLASS_DEVICE std::int64_t row(int i) const {
    return first + i / Sm::kRowsOfPart * Sm::kRowsAtOnce + i % Sm::kRowsOfPart * Sm::kRowDistance;
  }
  template <typename Number>
  CUTLASS_DEVICE Number load(const Number* numbers, int i, Number otherwise) const {
    return row(i) < count ? numbers[row(i)] : otherwise;
  }
};

/// A visitor of CUTLASS' epilogue. It computes t of each accumulator and gives t to an `Action`. docs/design.md says
/// why it is one visitor instead of a tree of CUTLASS' nodes. An action is
///
///   struct Action {
///     struct Arguments;
///     static constexpr bool kFindsShift;
///     Action(const Arguments&, const ThreadRows<Sm>&);
///     float of(int row, float t);   // the result before the soft cap's derivative; `row` counts the thread's rows
///     void end(const ThreadRows<Sm>&);  // after the last class of the tile; called by all lanes
///   };
///
/// An action that finds the shift itself has take() instead of of(). It takes the logits of a part before the product
/// with `factor`, and writes nothing.
template <typename Sm, typename Action, typename Element>
struct EndOfProduct : fusion::Sm90VisitorImpl<> {
  using ElementAux = Element;  // the element of an epilogue tile in kernels that write no matrix
  struct SharedStorage {};
  struct Arguments {
    const float* bias = nullptr;
    float to_tanh = 0.0f;
    float factor = 0.0f;
    const float* shift = nullptr;
    const std::int32_t* target = nullptr;
    float* target_logit = nullptr;
    typename Action::Arguments action{};
  };
  using Params = Arguments;

  template <typename Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <typename Problem>
  static bool can_implement(const Problem&, const Arguments&) {
    return true;
  }
  template <typename Problem>
  static std::size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <typename Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE EndOfProduct() {}
  CUTLASS_HOST_DEVICE EndOfProduct(const Params& params, const SharedStorage&) : params_(params) {}

  template <typename Coordinates>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    const Params& params;
    Coordinates coordinates;  ///< of the thread's logits, relative to its first one
    ThreadRows<Sm> rows;
    int first_class;  ///< of the thread
    int classes;      ///< the number of classes from first_class on
    float shift[kRowsOfThread<Sm>];
    int target[kRowsOfThread<Sm>];  ///< relative to first_class; negative: no target
    Action action;

    CUTLASS_DEVICE Callbacks(const Params& given, const Coordinates& of_thread, const ThreadRows<Sm>& of_rows,
                             int first, int left)
        : params(given),
          coordinates(of_thread),
          rows(of_rows),
          first_class(first),
          classes(left),
          action(given.action, of_rows) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsOfThread<Sm>; ++i) {
        if constexpr (!Action::kFindsShift) shift[i] = rows.load(params.shift, i, 0.0f);
        const std::int32_t column = rows.load(params.target, i, -1);
        target[i] = column < 0 ? -1 : column - first_class;
      }
    }

    /// CUTLASS unrolls these calls for all parts of a tile: the kernel has a copy of each line for every
    /// part.
    template <typename Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> z, int part, int of_rows, int of_columns) {
      const auto at = coordinates(cute::_, cute::_, cute::_, of_rows, of_columns);
      const int first_row = Sm::kRowsOfPart * of_rows;  // among the thread's rows
      const auto row_of = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE {
        if constexpr (Sm::kRowsOfPart == 1) return first_row;
        return first_row + (cute::get<0>(at(part * kSize + i)) - of_rows * Sm::kRowsAtOnce) / Sm::kRowDistance;
      };
      const auto column_of = [&](int i) CUTLASS_LAMBDA_FUNC_INLINE { return cute::get<1>(at(part * kSize + i)); };
      const int first = column_of(0);
      const int last = column_of(kSize - 1);
      const bool has_all = last < classes;
      if (params.bias != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; ++i) {
          if (has_all || column_of(i) < classes) z[i] += params.bias[first_class + column_of(i)];
        }
      }
      const auto is_here = [&](int column) CUTLASS_LAMBDA_FUNC_INLINE { return column >= first && column <= last; };
      if (is_here(target[first_row]) || (Sm::kRowsOfPart == 2 && is_here(target[first_row + 1]))) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; ++i) {
          if (column_of(i) == target[row_of(i)]) params.target_logit[rows.row(row_of(i))] = z[i];
        }
      }
      cutlass::Array<float, kSize> result;
      if constexpr (Action::kFindsShift) {
        result.fill(0.0f);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; ++i) {
          if (params.to_tanh != 0.0f) z[i] = tanh_and_derivative(z[i] * params.to_tanh).tanh;
          if (!has_all && column_of(i) >= classes) z[i] = -INFINITY;
        }
        action.take(first_row, z, params.factor,
                    [&](int i) CUTLASS_LAMBDA_FUNC_INLINE { return row_of(i) - first_row; });
      } else {
        const auto take = [&](int i, float inner) CUTLASS_LAMBDA_FUNC_INLINE {
          const float t = fmaf(inner, params.factor, -shift[row_of(i)]);
          return action.of(row_of(i), has_all || column_of(i) < classes ? t : -INFINITY);
        };
        if (params.to_tanh == 0.0f) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kSize; ++i) result[i] = take(i, z[i]);
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kSize; ++i) {
            const TanhAndDerivative capped = tanh_and_derivative(z[i] * params.to_tanh);
            const float value = take(i, capped.tanh);
            result[i] = value == 0.0f ? 0.0f : value * capped.derivative;  // a row that counts for nothing may have NaN
          }
        }
      }
      return cutlass::NumericArrayConverter<Element, float, kSize, kRounding>{}(result);
    }

    /// Skips tiles beyond the last class, which the scheduler adds if it takes several tiles in turn. Rows beyond the
    /// last one are the action's business.
    CUTLASS_DEVICE void end() {
      const int all_classes = first_class + classes;
      if (rows.class_tile * kExpProductClasses < all_classes) action.end(rows);
    }
  };

  template <bool kReferenceSource, typename... Types>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Types...>& args) {
    static_assert(decltype(cute::size<0>(args.epi_tile))::value == Sm::kRowsAtOnce, "the rows of ThreadRows");
    const int classes_left = cute::get<1>(args.residue_tCcD);
    const int all_rows = cute::get<0>(args.problem_shape_mnkl);
    const ThreadRows<Sm> rows = {all_rows - cute::get<0>(args.residue_tCcD), all_rows,
                                 cute::get<1>(args.tile_coord_mnkl)};
    return Callbacks<decltype(args.tCcD)>(params_, args.tCcD, rows,
                                          cute::get<1>(args.problem_shape_mnkl) - classes_left, classes_left);
  }

 private:
  Params params_;
};

/// A lower bound of t in moments. 2^t is 0 there; 0 * -infinity would be NaN.
inline constexpr float kLeastExponent = -1024.0f;

/// Returns E = 2^t, and sums E and E * t for each row and tile.
template <typename Sm>
struct SumExps {
  static constexpr bool kFindsShift = false;
  struct Arguments {
    float* sums;
    float* moments;
    std::int64_t stride;  ///< from tile to tile: the rows of whole tiles, all of which are written
  };
  Arguments to;
  float sum[kRowsOfThread<Sm>] = {};
  float moment[kRowsOfThread<Sm>] = {};

  CUTLASS_DEVICE SumExps(const Arguments& arguments, const ThreadRows<Sm>&) : to(arguments) {}

  CUTLASS_DEVICE float of(int row, float t) {
    const float exp = exp2_approximate(t);
    sum[row] += exp;
    moment[row] = fmaf(exp, fmaxf(t, kLeastExponent), moment[row]);
    return exp;
  }

  CUTLASS_DEVICE void end(const ThreadRows<Sm>& rows) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsOfThread<Sm>; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < Sm::kLanesOfRow; mask *= 2) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], mask);
        moment[i] += __shfl_xor_sync(~0u, moment[i], mask);
      }
      if (threadIdx.x % Sm::kLanesOfRow != 0 || rows.row(i) >= to.stride) continue;
      to.sums[rows.class_tile * to.stride + rows.row(i)] = sum[i];
      to.moments[rows.class_tile * to.stride + rows.row(i)] = moment[i];
    }
  }
};

/// The online softmax. The shift is the largest z * factor that the thread has seen in a row; end() raises it to the
/// largest in the row's tile.
template <typename Sm>
struct OnlineSoftmax {
  static constexpr bool kFindsShift = true;
  struct Arguments {
    float* shifts;
    float* sums;
    float* moments;
    std::int64_t stride;
  };
  Arguments to;
  float largest[kRowsOfThread<Sm>];
  float sum[kRowsOfThread<Sm>] = {};
  float moment[kRowsOfThread<Sm>] = {};

  CUTLASS_DEVICE OnlineSoftmax(const Arguments& arguments, const ThreadRows<Sm>&) : to(arguments) {
    CUTLASS_PRAGMA_UNROLL
    for (float& each : largest) each = -INFINITY;
  }

  /// Moves the row's sums to the shift of `larger`, and returns that shift. An empty sum has largest = -infinity.
  CUTLASS_DEVICE float raise(int row, float larger) {
    const float shift = fabsf(larger) < INFINITY ? larger : 0.0f;  // infinity - infinity would be NaN
    const float down = fmaxf(largest[row] - shift, kLeastExponent);
    const float factor = exp2_approximate(down);
    moment[row] = factor * fmaf(down, sum[row], moment[row]);
    sum[row] *= factor;
    largest[row] = larger;
    return shift;
  }

  template <int kSize, typename RowOf>
  CUTLASS_DEVICE void take(int first_row, const cutlass::Array<float, kSize>& inner, float factor, RowOf row_of) {
    float most[Sm::kRowsOfPart];
    CUTLASS_PRAGMA_UNROLL
    for (float& each : most) each = -INFINITY;  // fmaxf drops a NaN, which still reaches the sum
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) most[row_of(i)] = fmaxf(most[row_of(i)], inner[i]);
    float shift[Sm::kRowsOfPart];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < Sm::kRowsOfPart; ++r)
      shift[r] = raise(first_row + r, fmaxf(largest[first_row + r], most[r] * factor));
    const auto add = [&]<bool kHasMoment>() CUTLASS_LAMBDA_FUNC_INLINE {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const int row = first_row + row_of(i);
        const float t = fmaf(inner[i], factor, -shift[row_of(i)]);
        const float exp = exp2_approximate(t);
        sum[row] += exp;
        if constexpr (kHasMoment) moment[row] = fmaf(exp, fmaxf(t, kLeastExponent), moment[row]);
      }
    };
    // Without this branch, unwanted moments would make a loss with 32,768 or more classes take 3 % longer (H200).
    if (to.moments != nullptr) {
      add.template operator()<true>();
    } else {
      add.template operator()<false>();
    }
  }

  CUTLASS_DEVICE void end(const ThreadRows<Sm>& rows) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsOfThread<Sm>; ++i) {
      float most = largest[i];
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < Sm::kLanesOfRow; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
      raise(i, most);
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < Sm::kLanesOfRow; mask *= 2) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], mask);
        moment[i] += __shfl_xor_sync(~0u, moment[i], mask);
      }
      if (threadIdx.x % Sm::kLanesOfRow != 0 || rows.row(i) >= to.stride) continue;
      const std::int64_t at = rows.class_tile * to.stride + rows.row(i);
      to.shifts[at] = largest[i];
      to.sums[at] = sum[i];
      if (to.moments != nullptr) to.moments[at] = moment[i];
    }
  }
};

/// 2^t * (constant + slope * t). If both coefficients are 0, the row counts for nothing, and the result is 0 for any
/// logits.
template <typename Sm>
struct GradientOfLogits {
  static constexpr bool kFindsShift = false;
  struct Arguments {
    const float* constant;
    const float* slope;
  };
  float constant[kRowsOfThread<Sm>];
  float slope[kRowsOfThread<Sm>];

  CUTLASS_DEVICE GradientOfLogits(const Arguments& arguments, const ThreadRows<Sm>& rows) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsOfThread<Sm>; ++i) {
      constant[i] = rows.load(arguments.constant, i, 0.0f);
      slope[i] = rows.load(arguments.slope, i, 0.0f);
    }
  }

  CUTLASS_DEVICE float of(int row, float t) const {
    const float gradient = exp2_approximate(t) * fmaf(slope[row], fmaxf(t, kLeastExponent), constant[row]);
    return constant[row] == 0.0f && slope[row] == 0.0f ? 0.0f : gradient;
  }
  CUTLASS_DEVICE void end(const ThreadRows<Sm>&) const {}
};

// ---- kernels -------------------------------------------------------------------------------------------------------

/// Rows rounded up to whole tiles.
inline std::int64_t whole_rows(const ExpProduct& product) {
  return ceil_divide(product.rows, kExpProductRows) * kExpProductRows;
}

/// An epilogue that always stores, in a kernel that writes no matrix. The TMA drops stores beyond the end of a matrix;
/// this epilogue tells it of a matrix of one vector.
template <typename Collective>
struct DropsStores : Collective {
  using Collective::Collective;
  static constexpr int kColumns = 16 / sizeof(typename Collective::ElementD);

  template <typename Problem>
  static constexpr typename Collective::Params to_underlying_arguments(const Problem&,
                                                                       const typename Collective::Arguments& arguments,
                                                                       void* workspace) {
    return Collective::to_underlying_arguments(cute::make_shape(1, kColumns, 1, 1), arguments, workspace);
  }
};

[[maybe_unused]] static __device__ uint4 dropped;  ///< the memory of that vector

/// `Result` is the element of the matrix that the kernel writes, or void.
template <typename Sm, typename Element, typename Result, typename Action>
class Kernel {
  static constexpr int kAlignment = 16 / sizeof(Element);
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  static constexpr bool kDropsStores = Sm::kAlwaysStores && std::is_void_v<Result>;
  using Stored = std::conditional_t<kDropsStores, Element, Result>;
  using Storing = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename Sm::Architecture, cutlass::arch::OpClassTensorOp, typename Sm::Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, kAlignment, Stored, Row, kAlignment,
      typename Sm::EpilogueSchedule, EndOfProduct<Sm, Action, Element>>::CollectiveOp;
  using Epilogue = std::conditional_t<kDropsStores, DropsStores<Storing>, Storing>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      typename Sm::Architecture, cutlass::arch::OpClassTensorOp, Element, Row, kAlignment, Element, Column, kAlignment,
      float, typename Sm::Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Sm::MainloopSchedule>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>>;

 public:
  static void run(const char* op, const ExpProduct& product, const typename Action::Arguments& action, void* to,
                  std::int64_t stride, const Launch& launch) {
    typename Gemm::GemmKernel::StrideA x_stride{};
    typename Gemm::GemmKernel::StrideB weight_stride{};
    typename Gemm::GemmKernel::StrideD to_stride{};
    cute::get<0>(x_stride) = product.x.stride;
    cute::get<0>(weight_stride) = product.weight.stride;
    if constexpr (kDropsStores) {
      check_status(cudaGetSymbolAddress(&to, dropped), op);
      stride = kAlignment;
    }
    cute::get<0>(to_stride) = stride;
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(product.rows), static_cast<int>(product.classes), static_cast<int>(product.features), 1},
        {static_cast<const Element*>(product.x.data), x_stride, static_cast<const Element*>(product.weight.data),
         weight_stride},
        {{product.bias, product.to_tanh, product.factor, product.shift, product.target, product.target_logit, action},
         nullptr,
         {},
         static_cast<std::conditional_t<std::is_void_v<Result>, Element, Result>*>(to),
         to_stride}};
    arguments.hw_info = {0, launch.multiprocessors};
    using Order = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params::RasterOrderOptions;
    arguments.scheduler.raster_order = Order::AlongN;
    arguments.scheduler.max_swizzle_size = launch.in_turn;
    Gemm gemm;
    cutlass::Status status = gemm.initialize(arguments, nullptr, static_cast<cudaStream_t>(launch.stream));
    if (status == cutlass::Status::kSuccess) status = gemm.run(static_cast<cudaStream_t>(launch.stream));
    if (status != cutlass::Status::kSuccess) {
      throw DeviceError(std::string(op) + ": CUTLASS: " + cutlass::cutlassGetStatusString(status));
    }
  }
};

}  // namespace eaves::cuda
