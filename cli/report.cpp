// See report.h.
#include "cli/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <span>

#include "eaves/system.h"
#include "runtime/runtime.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Right-aligned columns two spaces apart, after a left-aligned index. `notes[i]` stands at the end of row i: what the
// row is where the axis alone does not say it, or why there are no numbers in it.
struct TextTable {
  std::vector<std::string> heads;
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;

  std::string str() const {
    std::vector<std::size_t> widths;
    for (const std::string& head : heads) widths.push_back(head.size());
    for (const auto& row : rows) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    const std::size_t index_width = std::to_string(std::max<std::size_t>(rows.size(), 1) - 1).size();
    std::string text(index_width, ' ');
    for (std::size_t i = 0; i < heads.size(); ++i) text += fmt::format("  {:>{}}", heads[i], widths[i]);
    text += '\n';
    for (std::size_t r = 0; r < rows.size(); ++r) {
      text += fmt::format("{:<{}}", r, index_width);
      for (std::size_t i = 0; i < rows[r].size(); ++i) text += fmt::format("  {:>{}}", rows[r][i], widths[i]);
      if (!notes[r].empty()) text += "  " + notes[r];
      text += '\n';
    }
    return text;
  }
};

// Tables whose rows differ in more than the axis name the rest: "batch=16 dim=1024 axes=[1]". What is the same option
// in every row belongs to the title.
std::string describe(const Table& table, const Row& row) {
  if (table.axis_tells_all) return "";
  const auto is_in_every_row = [&](const std::pair<std::string, std::string>& option) {
    return std::all_of(table.rows.begin(), table.rows.end(), [&](const Row& any) {
      return std::find(any.options.begin(), any.options.end(), option) != any.options.end();
    });
  };
  std::string text;
  const auto add = [&](const std::string& key, const auto& value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
  };
  const bool has_differing_options = std::any_of(table.rows.begin(), table.rows.end(), [&](const Row& any) {
    return !std::all_of(any.options.begin(), any.options.end(), is_in_every_row);
  });
  if (!has_differing_options) return "";
  for (const auto& [key, value] : row.shape) {
    if (key != table.axis_name) add(key, value);
  }
  for (const auto& option : row.options) {
    if (!is_in_every_row(option)) add(option.first, option.second);
  }
  return text;
}

// A busy machine, told by the times themselves: a median of more than twice the fastest repetition or, where not even
// the fastest found a quiet moment, a limit at less than half of what it has reached elsewhere in the run so far. Only
// limits of a millisecond and more are compared: shorter ones fit between two slices of the scheduler, and depend on
// their size.
constexpr double kUsualFactor = 2.0;
constexpr double kComparedMs = 1.0;

// Bytes or operations in a millisecond of the fastest repetition; 0 where it is not compared.
double limit_rate(const Row& row, const Measurement& measurement) {
  if (!measurement.limit || measurement.limit->min_ms < kComparedMs) return 0.0;
  const std::int64_t work = row.operations > 0 ? row.operations : row.read_bytes + row.write_bytes;
  return static_cast<double>(work) / measurement.limit->min_ms;
}

// Among rows that the same thing limits: memory, or products of one dtype.
double best_limit_rate(std::span<const MeasuredTable> run, bool has_operations, DType dtype) {
  double best = 0.0;
  for (const MeasuredTable& measured : run) {
    if (has_operations && measured.table.dtype != dtype) continue;
    for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
      const Row& row = measured.table.rows[i];
      if ((row.operations > 0) == has_operations) best = std::max(best, limit_rate(row, measured.measurements[i]));
    }
  }
  return best;
}

enum class Mark { none, unsteady, slow };

Mark mark_of(const Table& table, const Row& row, const Measurement& measurement, std::span<const MeasuredTable> run) {
  if (!measurement.eaves || !measurement.limit) return Mark::none;
  const double rate = limit_rate(row, measurement);
  const bool is_compared = rate > 0.0;
  if (is_compared && kUsualFactor * rate < best_limit_rate(run, row.operations > 0, table.dtype)) return Mark::slow;
  const auto is_unsteady = [](const Timing& timing) { return timing.median_ms > kUsualFactor * timing.min_ms; };
  return is_unsteady(*measurement.eaves) || is_unsteady(*measurement.limit) ? Mark::unsteady : Mark::none;
}

template <typename Columns>
std::string make_table(const MeasuredTable& measured, const char* kind, std::vector<std::string> heads,
                       const Columns& columns, const std::vector<MeasuredTable>* run = nullptr) {
  const Table& table = measured.table;
  TextTable text;
  text.heads = {table.axis_name};
  text.heads.insert(text.heads.end(), heads.begin(), heads.end());
  for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
    const Measurement& measurement = measured.measurements[i];
    std::vector<std::string> row = {fmt::format("{}.0", table.rows[i].axis_value)};
    std::string note = describe(table, table.rows[i]);
    if (measurement.skipped.empty()) {
      for (std::string& cell : columns(measurement)) row.push_back(std::move(cell));
    } else {
      note += (note.empty() ? "" : ": ") + measurement.skipped;
    }
    const Mark mark = run != nullptr ? mark_of(table, table.rows[i], measurement, *run) : Mark::none;
    if (mark != Mark::none) {
      note +=
          fmt::format("{}{}, fastest {:.3f} of {:.3f}", note.empty() ? "" : "  ",
                      mark == Mark::slow ? "slow" : "unsteady", measurement.eaves->min_ms, measurement.limit->min_ms);
    }
    text.rows.push_back(std::move(row));
    text.notes.push_back(std::move(note));
  }
  return fmt::format("{}-{}-{}-{}:\n{}", table.title_op.empty() ? table.op : table.title_op, kind, table.mode,
                     table.title_suffix, text.str());
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

nlohmann::ordered_json result_row(const Table& table, const Row& row, const Measurement& measurement,
                                  const char* provider, const std::optional<Timing>& timing, bool has_memory) {
  nlohmann::ordered_json json = {{"op", table.op}, {"mode", table.mode}, {"dtype", short_name_of(table.dtype)}};
  json["shape"] = nlohmann::ordered_json::object();
  for (const auto& [key, value] : row.shape) json["shape"][key] = value;
  json["options"] = nlohmann::ordered_json::object();
  for (const auto& [key, value] : row.options) json["options"][key] = nlohmann::ordered_json::parse(value);
  json["provider"] = provider;
  if (!timing) {
    json["ms"] = nullptr;
    json["skipped"] = measurement.skipped;
    return json;
  }
  json["ms"] = timing->median_ms;
  json["ms_min"] = timing->min_ms;
  json["ms_max"] = timing->max_ms;
  if (has_memory) {
    json["peak_mib"] = static_cast<double>(measurement.peak_bytes) / kMiB;
    json["workspace_mib"] = static_cast<double>(measurement.workspace_bytes) / kMiB;
  }
  if (row.operations > 0) {
    json["tflops"] = static_cast<double>(row.operations) / (timing->median_ms * 1e9);
  } else {
    json["gbps"] = static_cast<double>(row.read_bytes + row.write_bytes) / (timing->median_ms * 1e6);
  }
  json["repetitions"] = timing->repetitions;
  return json;
}

}  // namespace

std::string speed_table(const MeasuredTable& measured, const std::vector<MeasuredTable>& run) {
  return make_table(
      measured, "speed", {"eaves", "limit", "ratio"},
      [](const Measurement& measurement) {
        const double eaves = measurement.eaves->median_ms;
        const double limit = measurement.limit->median_ms;
        return std::vector<std::string>{fmt::format("{:.6f}", eaves), fmt::format("{:.6f}", limit),
                                        fmt::format("{:.3f}", eaves / limit)};
      },
      &run);
}

std::string marks_legend(const std::vector<MeasuredTable>& run) {
  int unsteady = 0, slow = 0;
  for (std::size_t t = 0; t < run.size(); ++t) {
    const MeasuredTable& measured = run[t];
    const std::span so_far(run.data(), t + 1);  // as when the table was printed
    for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
      const Mark mark = mark_of(measured.table, measured.table.rows[i], measured.measurements[i], so_far);
      unsteady += mark == Mark::unsteady;
      slow += mark == Mark::slow;
    }
  }
  if (unsteady + slow == 0) return "";
  return fmt::format(
      "# rows of a busy machine: {} unsteady (the median is more than twice the fastest repetition), {} slow\n"
      "# (even in the fastest the limit was less than half as fast as elsewhere in the run until then)\n",
      unsteady, slow);
}

std::string memory_table(const MeasuredTable& measured) {
  return make_table(measured, "memory", {"eaves", "workspace"}, [](const Measurement& measurement) {
    return std::vector<std::string>{fmt::format("{:.6f}", static_cast<double>(measurement.peak_bytes) / kMiB),
                                    fmt::format("{:.6f}", static_cast<double>(measurement.workspace_bytes) / kMiB)};
  });
}

std::string result_json(const std::vector<MeasuredTable>& tables, Device device, int threads, bool is_stopped) {
  const SystemInfo system = system_info();
  nlohmann::ordered_json json = {{"schema", 1}, {"device", runtime::device_name(device)}};
  if (device.type == DeviceType::cuda) {
    json["cuda"] = system.cuda_build_version;
    json["driver"] = system.cuda_driver_version;
  } else {
    json["cuda"] = nullptr;
    json["driver"] = nullptr;
    json["cpu_level"] = system.cpu_level;
    json["threads"] = threads > 0 ? threads : system.cpu_threads;
  }
  json["commit"] = system.commit;
  json["date"] = utc_now();
  json["protocol"] = "kernel";
  if (is_stopped) json["stopped"] = true;
  json["rows"] = nlohmann::ordered_json::array();
  for (const MeasuredTable& measured : tables) {
    for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
      const Row& row = measured.table.rows[i];
      const Measurement& measurement = measured.measurements[i];
      json["rows"].push_back(result_row(measured.table, row, measurement, "eaves", measurement.eaves, true));
      json["rows"].push_back(result_row(measured.table, row, measurement, "limit", measurement.limit, false));
    }
  }
  return json.dump(1) + "\n";
}

}  // namespace eaves::bench
