// Two declarations and one line per operator: <operator>_benchmark() is defined in src/ops/<operator>/, and
// add_run_<operator>() in cli/run_<operator>.cpp.
#include "cli/operators.h"

namespace eaves::bench {

Operator logsumexp_benchmark();
Operator cross_entropy_benchmark();
Operator linear_cross_entropy_benchmark();
Operator lrpe_cosine_benchmark();

}  // namespace eaves::bench

namespace eaves::cli {

void add_run_logsumexp(CLI::App& run);
void add_run_cross_entropy(CLI::App& run);
void add_run_linear_cross_entropy(CLI::App& run);
void add_run_lrpe_cosine(CLI::App& run);

std::span<const Operator> registered_operators() {
  static const Operator operators[] = {
      {bench::logsumexp_benchmark(), add_run_logsumexp},
      {bench::cross_entropy_benchmark(), add_run_cross_entropy},
      {bench::linear_cross_entropy_benchmark(), add_run_linear_cross_entropy},
      {bench::lrpe_cosine_benchmark(), add_run_lrpe_cosine},
  };
  return operators;
}

}  // namespace eaves::cli
