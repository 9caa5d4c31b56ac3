// One declaration and one line per operator. Each is defined in src/ops/<operator>/<operator>_bench.cpp.
#include "cli/operators.h"

namespace eaves::bench {

Operator logsumexp_benchmark();

}  // namespace eaves::bench

namespace eaves::cli {

std::span<const bench::Operator> registered_operators() {
  static const bench::Operator operators[] = {
      bench::logsumexp_benchmark(),
  };
  return operators;
}

}  // namespace eaves::cli
