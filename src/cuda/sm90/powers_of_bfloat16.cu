#include "cuda/sm90/exp_product_kernels.h"
#include "cuda/sm90/exp_product_sums.cuh"

namespace eaves::cuda::sm90 {
namespace {

/// Powers as PackedPower.
struct Pack : fusion::Sm90VisitorImpl<> {
  using fusion::Sm90VisitorImpl<>::Sm90VisitorImpl;

  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    template <typename Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(const cutlass::Array<Accumulator, kSize>&, int, int, int,
                              const cutlass::Array<float, kSize>& powers) {
      cutlass::Array<cutlass::bfloat16_t, kSize> packed;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) packed[i] = cutlass::bfloat16_t::bitcast(PackedPower::of(powers[i]).bits);
      return packed;
    }
  };
  template <bool kReferenceSource, typename... Types>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Types...>&) {
    return Callbacks{};
  }
};

}  // namespace

void powers_of_bfloat16(const char* op, const ExpProduct& product, const ExpProductPowers& to, int multiprocessors,
                        void* stream) {
  using Element = cutlass::bfloat16_t;
  using Tree = SumsAnd<Pack>;
  const typename Tree::Arguments tree{exponents_of(product),       {}, {to.sums.sums, 0.0f, {}}, {},
                                      {to.sums.moments, 0.0f, {}}, {}};
  Kernel<Element, Element, Tree>::run(op, product, tree, to.to, to.stride, multiprocessors, stream);
}

}  // namespace eaves::cuda::sm90
