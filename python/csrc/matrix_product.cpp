// Adds the product of two matrices to a third. Heads that are computed in chunks of rows
// (python/eaves/_chunked/head.py) add up their gradients with it.
#include <algorithm>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/gemm.h"
#include "runtime/runtime.h"
#include "torch_binding.h"

namespace eaves::binding {
namespace {

constexpr const char* kOp = "add_product";

/// A factor of the product; its rows or its columns have unit stride.
GemmMatrix factor(const check::Argument& matrix) {
  const TensorView& view = matrix.view;
  const auto lies_along = [&](int axis) {
    return (view.strides[axis] == 1 || view.shape[axis] == 1) &&
           (view.strides[1 - axis] >= view.shape[axis] || view.shape[1 - axis] == 1);
  };
  if (lies_along(1)) return {.data = view.data, .stride = std::max(view.strides[0], view.shape[1])};
  if (lies_along(0)) {
    return {.data = view.data, .stride = std::max(view.strides[1], view.shape[0]), .is_transposed = true};
  }
  check::fail(matrix,
              "has strides " + check::to_string(view.strides) +
                  ", expected unit stride along one axis, and along the other axis at least the size of the first");
}

/// sum += a * b
void add_product(Tensor sum, Tensor a, Tensor b) {
  const TensorView sum_view = output(sum);
  const TensorView a_view = input(a, {kOp, "a"});
  const TensorView b_view = input(b, {kOp, "b"});
  for (const TensorView* view : {&sum_view, &a_view, &b_view}) {
    if (view->shape.size() != 2) throw InvalidArgument("add_product: sum, a and b are expected to have two axes each");
  }
  const Dims& shape = sum_view.shape;
  const std::int64_t depth = a_view.shape[1];
  check::has_shape({kOp, "a", a_view}, {shape[0], depth}, "as many rows as `sum`");
  check::has_shape({kOp, "b", b_view}, {depth, shape[1]}, "the columns of `a` and of `sum`");
  check::has_dtype({kOp, "b", b_view}, {a_view.dtype}, "as `a`");
  check::has_dtype({kOp, "sum", sum_view}, {accumulator_dtype(a_view.dtype), a_view.dtype},
                   "the dtype of sums, or as `a`");
  check::is_on({kOp, "a", a_view}, sum_view.device, "sum");
  check::is_on({kOp, "b", b_view}, sum_view.device, "sum");
  if (sum_view.element_count() == 0 || depth == 0) return;
  const GemmMatrix to = factor({kOp, "sum", sum_view});
  if (to.is_transposed) {
    check::fail({kOp, "sum", sum_view},
                "has strides " + check::to_string(sum_view.strides) + ", expected unit stride along its rows");
  }
  Call call(sum_view.device);
  if (sum_view.device.type == DeviceType::cuda) call.take_workspace(kGemmWorkspaceBytes);
  runtime::matrix_product(sum_view.device,
                          {.m = shape[0],
                           .n = shape[1],
                           .k = depth,
                           .dtype = a_view.dtype,
                           .a = factor({kOp, "a", a_view}),
                           .b = factor({kOp, "b", b_view}),
                           .c_dtype = sum_view.dtype,
                           .c = sum_view.data,
                           .c_stride = to.stride,
                           .accumulates = true},
                          call.context());
}

void implement(Library& library) { library.impl("add_product", EAVES_BOX(add_product)); }

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) { library.def("add_product(Tensor(a!) sum, Tensor a, Tensor b) -> ()"); }
EAVES_IMPLEMENT(eaves::binding::implement)
