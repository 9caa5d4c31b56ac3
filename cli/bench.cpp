// `eaves bench`: asks the operators for their tables, lets the harness measure them, and prints each result as it
// comes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/commands.h"
#include "cli/harness.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/stop.h"
#include "eaves/error.h"
#include "eaves/system.h"
#include "runtime/runtime.h"

// An operator needs a line here and one in chosen_operators(); <operator>_benchmark() is in src/ops/<operator>/.
namespace eaves::bench {

Operator logsumexp_benchmark();
Operator cross_entropy_benchmark();
Operator linear_cross_entropy_benchmark();
Operator lrpe_cosine_benchmark();

}  // namespace eaves::bench

namespace eaves::cli {
namespace {

// One line that overwrites itself on a terminal. It prints nothing if stderr is a file or a pipe.
class Progress {
 public:
  Progress() : is_terminal_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() { clear(); }
  void show(const bench::Table& table, std::size_t row) const {
    if (!is_terminal_) return;
    fmt::print(stderr, "\r\033[K{} {} (row {} of {})", table.op, table.rows[row].mode, row + 1, table.rows.size());
    std::fflush(stderr);
  }
  void clear() const {
    if (is_terminal_) fmt::print(stderr, "\r\033[K");
  }

 private:
  bool is_terminal_;
};

constexpr double kBusy = 0.25;  // of all cores' time: half a core of two

// The time for a shape of the user's own. With the setup, the answer takes at most 30 seconds.
constexpr double kShapeMs = 15000.0;

std::vector<bench::Operator> chosen_operators(const std::vector<std::string>& names) {
  const std::vector<bench::Operator> known = {bench::logsumexp_benchmark(), bench::cross_entropy_benchmark(),
                                              bench::linear_cross_entropy_benchmark(), bench::lrpe_cosine_benchmark()};
  if (names.empty()) return known;
  std::vector<bench::Operator> chosen;
  for (const std::string& name : names) {
    const auto found = std::find_if(known.begin(), known.end(), [&](const auto& item) { return item.name == name; });
    if (found == known.end()) {
      std::string list;
      for (const bench::Operator& item : known) list += (list.empty() ? "" : ", ") + item.name;
      throw InvalidArgument(fmt::format("bench: there is no operator \"{}\", expected one of: {}", name, list));
    }
    chosen.push_back(*found);
  }
  return chosen;
}

// The standard output of a run. It fails if the reader of a pipe has left (| head) or a disk is full. A run that writes
// a file then continues; any other run ends. Ctrl-C also ends the reader of a pipe, and a run with such a reader still
// obeys it.
class Screen {
 public:
  explicit Screen(bool has_file) : has_file_(has_file) {}
  void show(const std::string& text) {
    if (failure_) return;
    try {
      std::fputs(text.c_str(), stdout);
      flush_output();
    } catch (const std::system_error&) {
      if (!has_file_ && !is_stop_wanted()) throw;
      failure_ = std::current_exception();
    }
  }
  void finish() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  bool has_file_;
  std::exception_ptr failure_;
};

// Measures row by row into `measured`; false if the run was stopped before the last row.
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

// Prints each table as soon as it is measured; false if the run was stopped.
bool measure_tables(bench::Harness& harness, Screen& screen, std::vector<bench::Table> tables,
                    std::vector<bench::MeasuredTable>& run) {
  bool is_complete = true;
  for (auto table = tables.begin(); is_complete && table != tables.end(); ++table) {
    run.push_back({std::move(*table), {}});
    is_complete = measure_rows(harness, run.back());
    if (run.back().measurements.empty()) {
      run.pop_back();
    } else {
      bench::mark_busy_rows(run);
      screen.show(bench::text_table(run.back()) + "\n");
    }
  }
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

// Says where the results of a stopped run are.
std::string describe_stopped(std::int64_t measured_rows, const std::string& json_path) {
  if (measured_rows == 0) return "stopped before the first row was measured; no file is written";
  const std::string rows =
      fmt::format("stopped; {} measured row{} ", measured_rows, measured_rows == 1 ? " is" : "s are");
  return rows + (json_path.empty() ? "printed above; --json FILE also writes them to a file" : "in " + json_path);
}

// "rows=2048,dim=768,v=50257" for the axes of an operator; "grid=4x8x8" may stand for a length.
bench::Shape parse_shape(const bench::Operator& op, const std::string& text) {
  bench::Shape shape;
  double elements = 1.0;
  std::vector<std::string> missing = op.axes;
  const auto refuse = [&] {
    const bool has_length = std::find(op.axes.begin(), op.axes.end(), "length") != op.axes.end();
    throw InvalidArgument(fmt::format("--shape: is \"{}\", expected a positive size for each axis of {}: {}=...{}",
                                      text, op.name, fmt::join(op.axes, "=...,"),
                                      has_length ? " (or grid=4x8x8 instead of length)" : ""));
  };
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const std::size_t equals = std::min(item.find('='), item.size());
    const std::string name = item.substr(0, equals);
    const bool is_grid = name == "grid";
    if (std::erase(missing, is_grid ? "length" : name) == 0 || equals == item.size()) refuse();
    const Dims sizes = parse_list("--shape", item.substr(equals + 1), "sizes such as 2048 or 4x8x8", 'x');
    for (const std::int64_t size : sizes) {
      if (size < 1) refuse();
      elements *= static_cast<double>(size);
    }
    if (is_grid) {
      shape.grid = sizes;
    } else if (sizes.size() == 1) {
      shape.sizes[name] = sizes[0];
    } else {
      refuse();
    }
    begin = end + 1;
  }
  if (!missing.empty()) refuse();
  if (elements > 1e15) throw InvalidArgument(fmt::format("--shape: is {}, which is too large for any memory", text));
  return shape;
}

// The share of all cores' time that other programs take during a tenth of a second, in which this program sleeps. 0 if
// the system does not report it.
double busy_share() {
  struct Ticks {
    double all = 0.0, idle = 0.0;
  };
  const auto read = [] {
    std::ifstream file("/proc/stat");
    std::string cpu;
    file >> cpu;
    Ticks ticks;
    // user, nice, system, idle, iowait, irq, softirq, steal; user and nice already contain the fields behind these.
    double count = 0.0;
    for (int field = 0; field < 8 && file >> count; ++field) {
      ticks.all += count;
      if (field == 3 || field == 4) ticks.idle += count;
    }
    return ticks;
  };
  const Ticks before = read();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const Ticks after = read();
  return after.all > before.all ? 1.0 - (after.idle - before.idle) / (after.all - before.all) : 0.0;
}

std::string heading(Device device, const BenchArguments& arguments) {
  const SystemInfo system = system_info();
  std::string text =
      fmt::format("# {}\n# eaves {}, commit {}\n", runtime::device_name(device), system.version, system.commit);
  if (device.type == DeviceType::cpu && arguments.threads > 0)
    text += fmt::format("# threads: {}\n", arguments.threads);
  const double share = device.type == DeviceType::cpu ? busy_share() : 0.0;
  if (share >= kBusy) {
    text += fmt::format("# other programs use {:.0f} % of the CPU: these times will be too long\n", 100.0 * share);
  }
  return text +
         "# eaves: the operator's time in ms (median)\n"
         "# limit: the time for the same bytes, or the same matrix products, and no more\n"
         "# ratio: eaves / limit\n"
         "# memory: inputs, outputs and workspace in MiB; workspace: its share of them\n"
         "# *: other programs slowed this row down\n\n";
}

}  // namespace

void run_bench(const BenchArguments& arguments) {
  const std::vector<bench::Operator> operators = chosen_operators(arguments.operators);
  bench::Request request;
  request.sweep = arguments.sweep == "published" ? bench::Sweep::published : bench::Sweep::quick;
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
  // Opened before minutes of measuring, so that a wrong path fails at once.
  std::optional<AtomicFile> json_file;
  if (!arguments.json_path.empty()) json_file.emplace("--json", arguments.json_path);

  const bool has_shape = !arguments.shape.empty();
  if (has_shape && operators.size() != 1) throw InvalidArgument("--shape: expected the name of one operator before it");
  std::vector<bench::Table> own;
  if (has_shape) {
    const bench::Operator& op = operators.front();
    own = {{op.name, request.dtype, op.rows_of_shape(parse_shape(op, arguments.shape), request.dtype)}};
    options.row_ms = kShapeMs / static_cast<double>(own.front().rows.size());
  }

  defer_stop();
  Screen screen(json_file.has_value());
  screen.show(heading(request.device, arguments));
  bench::Harness harness(options);
  std::vector<bench::MeasuredTable> run;
  bool is_complete = true;
  for (auto op = operators.begin(); is_complete && op != operators.end(); ++op) {
    is_complete = measure_tables(harness, screen, has_shape ? own : op->tables(request), run);
  }
  screen.show(bench::summary(run));
  const std::int64_t measured_rows = count_measured_rows(run);
  if (is_complete && !arguments.max_bytes.empty() && measured_rows == 0) {
    throw InvalidArgument(
        fmt::format("--max-bytes: is {}, which skips every row; expected a larger limit", arguments.max_bytes));
  }
  if (json_file && (is_complete || measured_rows > 0)) {
    const std::string json = bench::result_json(run, request.device, arguments.threads, !is_complete);
    json_file->write(json.data(), json.size());
    json_file->commit();
  }
  if (!is_complete) throw Stopped{describe_stopped(measured_rows, arguments.json_path)};
  screen.finish();
}

}  // namespace eaves::cli
