// The commands of the program, their arguments as main() reads them from the command line, and the exit codes of their
// failures. Only main.cpp knows the parser.
#pragma once

#include <string>
#include <vector>

#include "cli/self_test_cases.h"

namespace eaves::cli {

constexpr int kDeviceOrSystemFailed = 1;
constexpr int kWrongArgumentOrFile = 2;
constexpr int kUnsupported = 3;

void print_info(bool is_json);
/// Prints the text of print_info() and the table of the self-test. Throws DeviceError if a line differs.
void print_self_test(const std::vector<SelfTestCase>& cases);

struct BenchArguments {
  std::vector<std::string> operators;  ///< empty: all
  std::string device;                  ///< "": a GPU if one is usable
  std::string sweep = "quick";
  std::string shape;
  std::string dtype;
  std::string json_path;
  std::string max_bytes;
  int threads = 0;
  int repetitions = 30;
  double warm_up_ms = 500.0;
};

void run_bench(const BenchArguments& arguments);

}  // namespace eaves::cli
