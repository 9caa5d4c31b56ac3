// `eaves bench`: asks the operators for their tables, lets the harness measure them, prints what came out as it comes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/busy.h"
#include "cli/commands.h"
#include "cli/harness.h"
#include "cli/operators.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/stop.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> operators;
  std::string device;
  std::string sweep = "quick";
  std::string dtype;
  std::string json_path;
  std::string max_bytes;
  int threads = 0;
  int repetitions = 30;
  double warm_up_ms = 500.0;
};

// One line that overwrites itself on a terminal; nothing where stderr is a file or a pipe.
class Progress {
 public:
  Progress() : is_terminal_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() { clear(); }
  void show(const bench::Table& table, std::size_t row) const {
    if (!is_terminal_) return;
    fmt::print(stderr, "\r\033[K{} {} {}={} (row {} of {})", table.op, table.mode, table.axis_name,
               table.rows[row].axis_value, row + 1, table.rows.size());
    std::fflush(stderr);
  }
  void clear() const {
    if (is_terminal_) fmt::print(stderr, "\r\033[K");
  }

 private:
  bool is_terminal_;
};

std::vector<Operator> chosen_operators(const std::vector<std::string>& names) {
  const auto registered = registered_operators();
  if (names.empty()) return {registered.begin(), registered.end()};
  std::vector<Operator> chosen;
  for (const std::string& name : names) {
    std::string known;
    const Operator* found = nullptr;
    for (const Operator& candidate : registered) {
      known += (known.empty() ? "" : ", ") + candidate.benchmark.name;
      if (candidate.benchmark.name == name) found = &candidate;
    }
    if (found == nullptr) {
      throw InvalidArgument(fmt::format("bench: there is no operator \"{}\", expected one of: {}", name, known));
    }
    chosen.push_back(*found);
  }
  return chosen;
}

// Ctrl-C also ends the reader of a pipe: what cannot be shown then may not keep the rest from being written.
void show(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  if (std::fflush(stdout) != 0 && !is_stop_wanted()) throw std::runtime_error("standard output cannot be written");
}

// Row by row into `measured`; false where the run was stopped before the last.
bool measure_rows(bench::Harness& harness, bench::MeasuredTable& measured) {
  const Progress progress;
  try {
    harness.warm_up();
    for (std::size_t row = 0; row < measured.table.rows.size(); ++row) {
      progress.show(measured.table, row);
      measured.measurements.push_back(harness.measure(measured.table.rows[row]));
    }
  } catch (const Stopped&) {
    return false;
  }
  return true;
}

// The tables of an operator, each printed as soon as it is measured; false where the run was stopped.
bool measure_tables(bench::Harness& harness, std::vector<bench::Table> tables, std::vector<bench::MeasuredTable>& run) {
  const std::size_t first = run.size();
  bool is_complete = true;
  for (auto table = tables.begin(); is_complete && table != tables.end(); ++table) {
    run.push_back({std::move(*table), {}});
    is_complete = measure_rows(harness, run.back());
    if (run.back().measurements.empty())
      run.pop_back();
    else
      show(bench::speed_table(run.back(), run) + "\n");
  }
  for (std::size_t i = first; i < run.size(); ++i) show(bench::memory_table(run[i]) + "\n");
  return is_complete;
}

std::int64_t count_measured_rows(const std::vector<bench::MeasuredTable>& run) {
  std::int64_t count = 0;
  for (const bench::MeasuredTable& table : run) {
    count += std::count_if(table.measurements.begin(), table.measurements.end(),
                           [](const bench::Measurement& row) { return row.skipped.empty(); });
  }
  return count;
}

// Where what was measured lies.
std::string describe_stopped(std::int64_t measured_rows, const std::string& json_path) {
  if (measured_rows == 0) return "stopped before a row was measured; nothing is written";
  const std::string rows =
      fmt::format("stopped; what was measured, {} row{}, is ", measured_rows, measured_rows == 1 ? "" : "s");
  return rows + (json_path.empty() ? "above, and in no file without --json" : "in " + json_path);
}

// As in python/eaves/bench/published.py, but without its --protocol.
constexpr const char* kPublished[] = {
    "eaves started from published measurements of other libraries. `--sweep seed` measures the same shapes.",
    "In their titles `lce` means linear_cross_entropy and `md_lrpe_cosine` means lrpe_cosine over a grid."};

void print_heading(Device device, const BenchArguments& arguments) {
  const SystemInfo system = system_info();
  fmt::print("# {}, eaves {} (commit {})\n", runtime::device_name(device), system.version, system.commit);
  if (device.type == DeviceType::cpu && arguments.threads > 0) fmt::print("# threads: {}\n", arguments.threads);
  if (device.type == DeviceType::cpu) say_if_busy();
  fmt::print(
      "# speed in ms, median; limit: plain streaming of the same bytes in the same run, or the matrix products "
      "alone; ratio: eaves / limit\n");
  fmt::print("# memory in MiB: peak with inputs and outputs counted, and the workspace alone\n");
  fmt::print("# {}\n\n", fmt::join(kPublished, "\n# "));
}

void run_bench(const BenchArguments& arguments) {
  const std::vector<Operator> operators = chosen_operators(arguments.operators);
  bench::Request request;
  request.sweep = arguments.sweep == "seed" ? bench::Sweep::seed : bench::Sweep::quick;
  request.device = arguments.device.empty() ? default_device() : parse_device(arguments.device);
  request.has_dtype = !arguments.dtype.empty();
  if (request.has_dtype) request.dtype = parse_dtype("--dtype", arguments.dtype);
  if (!is_floating_point(request.dtype)) {
    throw InvalidArgument(fmt::format("--dtype: is {}, expected a floating-point type", arguments.dtype));
  }
  bench::HarnessOptions options;
  options.device = request.device;
  options.threads = arguments.threads;
  options.repetitions = arguments.repetitions;
  options.warm_up_ms = arguments.warm_up_ms;
  if (!arguments.max_bytes.empty()) options.max_bytes = parse_bytes("--max-bytes", arguments.max_bytes);
  // Opened before minutes of measuring, so that a wrong path is known at once.
  std::optional<AtomicFile> json_file;
  if (!arguments.json_path.empty()) json_file.emplace("--json", arguments.json_path);

  defer_stop();
  print_heading(request.device, arguments);
  bench::Harness harness(options);
  std::vector<bench::MeasuredTable> run;
  bool is_complete = true;
  for (auto op = operators.begin(); is_complete && op != operators.end(); ++op) {
    is_complete = measure_tables(harness, op->benchmark.tables(request), run);
  }
  show(bench::marks_legend(run));
  const std::int64_t measured_rows = count_measured_rows(run);
  if (is_complete && !arguments.max_bytes.empty() && measured_rows == 0) {
    throw InvalidArgument(fmt::format("--max-bytes: {} leaves out every row, expected more", arguments.max_bytes));
  }
  if (json_file && (is_complete || measured_rows > 0)) {
    const std::string json = bench::result_json(run, request.device, arguments.threads, !is_complete);
    json_file->write(json.data(), json.size());
    json_file->commit();
  }
  if (!is_complete) throw Stopped{describe_stopped(measured_rows, arguments.json_path)};
}

}  // namespace

void add_bench_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand("bench", "Measure operators against the limit of the device.");
  command->footer(
      fmt::format("{}\n\nExample:\n"
                  "  eaves bench logsumexp --device cpu --dtype bf16 --max-bytes 8M --json result.json\n\n"
                  "A run that is stopped (Ctrl-C, SIGTERM, SIGHUP) writes what it has measured and ends with exit code "
                  "130.\nA second signal ends it at once.",
                  fmt::join(kPublished, "\n")));
  const auto arguments = std::make_shared<BenchArguments>();
  command->add_option("operator", arguments->operators, "Operators to measure; without any: all of them");
  command->add_option("--device", arguments->device, "cpu, cuda or cuda:N; without: cuda where a GPU is usable")
      ->check(is_not_empty());
  command
      ->add_option("--sweep", arguments->sweep,
                   "quick: lengths that suit the device; seed: the rows of the published tables, no others")
      ->check(CLI::IsMember({"quick", "seed"}))
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype,
                      "bf16, fp16, fp32 or fp64; without: bf16, and fp32 where it differs");
  command->add_option("--json", arguments->json_path, "Also write the results to this file")->check(is_not_empty());
  command->add_option("--threads", arguments->threads, "CPU threads; 0: all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--max-bytes", arguments->max_bytes,
                      "Leave out rows that read and write more, such as 64M or 2G");
  command->add_option("--repetitions", arguments->repetitions, "Of each row; slow rows get fewer, at least 5")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--warm-up-ms", arguments->warm_up_ms, "Before each table, until the clocks have settled")
      ->check(CLI::Range(0.0, 60000.0))
      ->capture_default_str();
  command->callback([arguments] { run_bench(*arguments); });
}

}  // namespace eaves::cli
