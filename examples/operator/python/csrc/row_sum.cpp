// row_sum for torch.
#include "eaves/row_sum.h"

#include "torch_binding.h"

namespace eaves::binding {
namespace {

Tensor forward(Tensor x) {
  RowSumForwardArgs args{.x = input(x, {"row_sum", "x"})};
  Dims row_shape;
  for (int axis = 0; axis + 1 < args.x.shape.size(); ++axis) row_shape.push_back(args.x.shape[axis]);
  Tensor out = empty(row_shape, args.x.dtype, args.x.device);
  args.out = output(out);
  run<row_sum_forward>(args, args.x.device);
  return out;
}

void implement(Library& library) { library.impl("row_sum_forward", EAVES_BOX(forward)); }

}  // namespace
}  // namespace eaves::binding

STABLE_TORCH_LIBRARY_FRAGMENT(eaves, library) { library.def("row_sum_forward(Tensor x) -> Tensor"); }
EAVES_IMPLEMENT(eaves::binding::implement)
