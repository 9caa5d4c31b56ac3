// CUTLASS' product for Hopper (TMA, warp-specialised, two consumer warpgroups with a tile each): one warpgroup loads
// and stores its tile of c while the other multiplies.
//
// The kernel computes c^T += alpha b^T a, with c, b and a as column-major matrices. The long side of a tile, 192, then
// lies along the classes, which are many.
#include "cuda/cutlass/weight_gradient.h"

#include <cuda_runtime.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <string>

#include "eaves/error.h"

namespace eaves::cuda {
namespace {

using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::Int<kWeightGradientFeatures>, cute::Int<kWeightGradientClasses>, cute::_64>;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, Element, Column, kGemmVector, Element, Column, kGemmVector, cutlass::epilogue::TmaWarpSpecialized,
    cutlass::epilogue::fusion::LinearCombination<Element, float, Element, float>>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Column, kGemmVector, Element, Row, kGemmVector, float,
    Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;

}  // namespace

void weight_gradient(const char* op, const eaves::Gemm& product, int multiprocessors, void* stream) {
  using Product = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  Kernel::StrideA b_stride{};
  Kernel::StrideB a_stride{};
  Kernel::StrideC c_stride{};
  cute::get<1>(b_stride) = product.b.stride;
  cute::get<1>(a_stride) = product.a.stride;
  cute::get<1>(c_stride) = product.c_stride;
  Product::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {static_cast<int>(product.n), static_cast<int>(product.m), static_cast<int>(product.k), 1},
      {static_cast<const Element*>(product.b.data), b_stride, static_cast<const Element*>(product.a.data), a_stride},
      {{}, static_cast<const Element*>(product.c), c_stride, static_cast<Element*>(product.c), c_stride}};
  arguments.epilogue.thread.alpha_ptr = static_cast<const float*>(product.alpha);
  arguments.epilogue.thread.beta = 1.0f;
  arguments.hw_info = {0, multiprocessors};
  arguments.scheduler.raster_order =
      cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params::RasterOrderOptions::AlongM;
  Product run;
  cutlass::Status status = run.initialize(arguments, nullptr, static_cast<cudaStream_t>(stream));
  if (status == cutlass::Status::kSuccess) status = run.run(static_cast<cudaStream_t>(stream));
  if (status != cutlass::Status::kSuccess) {
    throw DeviceError(std::string(op) + ": CUTLASS: " + cutlass::cutlassGetStatusString(status));
  }
}

}  // namespace eaves::cuda
