// The kernel of cross_entropy_in_place.cuh with options, in a file of its own because it takes long to compile.
#include "ops/cross_entropy/cross_entropy_in_place.cuh"

namespace eaves::cuda {

template <typename T>
void launch_full_rows(const char* op, const InPlace<T, true>& operation, bool follows_kernel, void* stream) {
  dispatch_narrow<T>(operation.grad_dtype, [&]<bool kIsNarrow>() {
    operation.rows.in.has_factors
        ? launch_in_cluster<RowOptions::factors, kIsNarrow>(op, operation, follows_kernel, stream)
        : launch_in_cluster<RowOptions::some, kIsNarrow>(op, operation, follows_kernel, stream);
  });
}

template void launch_full_rows<float>(const char*, const InPlace<float, true>&, bool, void*);
template void launch_full_rows<float16>(const char*, const InPlace<float16, true>&, bool, void*);
template void launch_full_rows<bfloat16>(const char*, const InPlace<bfloat16, true>&, bool, void*);

}  // namespace eaves::cuda
