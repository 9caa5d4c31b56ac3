// See report.h.
#include "cli/report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include "eaves/system.h"
#include "runtime/runtime.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr std::size_t kWidth = 80;
constexpr std::string_view kBusy = " busy";

// Three significant digits; all digits before the point.
std::string three_digits(double number) {
  if (number <= 0.0) return "0";
  return fmt::format("{:.{}f}", number, std::clamp(2 - static_cast<int>(std::floor(std::log10(number))), 0, 9));
}

struct TextRow {
  std::string name;
  std::vector<std::string> cells;
  std::string note = {};  // on lines of its own
  bool is_busy = false;   // with kBusy behind the cells
};

// Names at the left, numbers in columns at the right under the heads of the first row. A name too long for a place
// beside the numbers has its own line.
std::string layout(const std::string& title, std::vector<TextRow> rows) {
  std::vector<std::size_t> widths(rows.front().cells.size());
  for (const TextRow& row : rows) {
    for (std::size_t i = 0; i < row.cells.size(); ++i) widths[i] = std::max(widths[i], row.cells[i].size());
  }
  std::size_t room = kWidth - kBusy.size(), longest = 0;
  for (const std::size_t width : widths) room -= 2 + width;
  for (const TextRow& row : rows) {
    if (!row.cells.empty() && row.name.size() <= room) longest = std::max(longest, row.name.size());
  }
  std::string text = wrap(title);
  for (TextRow& row : rows) {
    if (row.cells.empty()) {
      text += wrap(row.name.empty() ? row.note : row.name + ": " + row.note);
      continue;
    }
    if (row.name.size() > room) text += wrap(std::exchange(row.name, ""));
    text += fmt::format("{:<{}}", row.name, longest);
    for (std::size_t i = 0; i < row.cells.size(); ++i) text += fmt::format("  {:>{}}", row.cells[i], widths[i]);
    if (row.is_busy) text += kBusy;
    text += '\n' + (row.note.empty() ? "" : wrap(row.note, "  "));
  }
  return text;
}

// A row in words: its mode, sizes, and options other than the defaults.
using Words = std::vector<std::string>;

std::string words_of_mode(const std::string& mode) {
  if (mode == "fwd") return "forward";
  return mode == "bwd" ? "backward" : "forward and backward";
}

Words words_of(const Row& row) {
  Words words = {words_of_mode(row.mode)};
  for (const auto& [key, size] : row.shape) words.push_back(fmt::format("{} {}", key, size));
  for (const auto& [key, value] : row.options) {
    std::string text = value;
    std::erase(text, '"');
    words.push_back(text == "true" ? key : key + " " + text);
  }
  return words;
}

// The words of `row` that every row of the table has, or the other words.
std::string join(const Row& row, const Table& table, bool is_common) {
  Words words = words_of(row);
  std::erase_if(words, [&](const std::string& word) {
    return is_common != std::all_of(table.rows.begin(), table.rows.end(), [&](const Row& other) {
             const Words others = words_of(other);
             return std::find(others.begin(), others.end(), word) != others.end();
           });
  });
  return fmt::format("{}", fmt::join(words, ", "));
}

// body(table, row, measurement) for each row that was measured or left out.
template <typename Run, typename Body>
void for_each_row(Run&& run, const Body& body) {
  for (auto& measured : run) {
    for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
      body(measured.table, measured.table.rows[i], measured.measurements[i]);
    }
  }
}

// The times themselves show a busy machine. A row gets a mark if its median is more than twice the fastest repetition,
// or if even the fastest repetition found no quiet moment: its limit was less than half as fast as elsewhere in the run
// so far. Only limits of a millisecond and more are compared, because shorter ones fit between two slices of the
// scheduler and depend on their size. Products of `spread` data are not compared either: their gradients have subnormal
// numbers, which cost a CPU more. benchmarks/bench/tables.py applies the first rule to the times of any provider.
constexpr double kUsualFactor = 2.0;
constexpr double kComparedMs = 1.0;

// Bytes or operations per millisecond of the fastest repetition; 0 if the row is not compared.
double limit_rate(const Row& row, const Measurement& measurement) {
  const bool is_spread = std::find(row.options.begin(), row.options.end(),
                                   std::pair<std::string, std::string>("data", "\"spread\"")) != row.options.end();
  if (is_spread || !measurement.limit || measurement.limit->min_ms < kComparedMs) return 0.0;
  const std::int64_t work = row.operations > 0 ? row.operations : row.read_bytes + row.write_bytes;
  return static_cast<double>(work) / measurement.limit->min_ms;
}

nlohmann::ordered_json result_row(const Table& table, const Row& row, const Measurement& measurement, bool is_eaves) {
  auto shape = nlohmann::ordered_json::object(), options = nlohmann::ordered_json::object();
  for (const auto& [key, value] : row.shape) shape[key] = value;
  for (const auto& [key, value] : row.options) options[key] = nlohmann::ordered_json::parse(value);
  nlohmann::ordered_json json = {{"op", table.op}, {"mode", row.mode},   {"dtype", short_name_of(table.dtype)},
                                 {"shape", shape}, {"options", options}, {"provider", is_eaves ? "eaves" : "limit"}};
  const std::optional<Timing>& timing = is_eaves ? measurement.eaves : measurement.limit;
  if (!timing) {
    json["ms"] = nullptr;
    json["skipped"] = measurement.skipped;
    return json;
  }
  json["ms"] = timing->median_ms;
  json["ms_min"] = timing->min_ms;
  json["ms_max"] = timing->max_ms;
  if (is_eaves) {
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

std::string wrap(const std::string& text, const std::string& first_indent) {
  std::string lines = first_indent, indent = first_indent + "  ";
  std::size_t width = lines.size();
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    if (begin > 0 && width + 1 + end - begin > kWidth) {
      lines += '\n' + indent;
      width = indent.size();
    } else if (begin > 0) {
      lines += ' ';
      ++width;
    }
    lines += text.substr(begin, end - begin);
    width += end - begin;
    begin = end + 1;
  }
  return lines + '\n';
}

void mark_busy_rows(std::vector<MeasuredTable>& run) {
  const auto is_unsteady = [](const Timing& timing) { return timing.median_ms > kUsualFactor * timing.min_ms; };
  for_each_row(std::span(run).last(1), [&](const Table& table, const Row& row, Measurement& measurement) {
    if (!measurement.eaves || !measurement.limit) return;
    const double rate = limit_rate(row, measurement);
    double best = rate;  // among rows with the same limit: memory, or products of one dtype
    for_each_row(run, [&](const Table& of, const Row& other, const Measurement& by) {
      const bool is_like = (other.operations > 0) == (row.operations > 0);
      if (is_like && (row.operations == 0 || of.dtype == table.dtype)) best = std::max(best, limit_rate(other, by));
    });
    const bool is_slow = rate > 0.0 && kUsualFactor * rate < best;
    measurement.is_busy = is_slow || is_unsteady(*measurement.eaves) || is_unsteady(*measurement.limit);
  });
}

std::string text_table(const MeasuredTable& measured) {
  std::vector<TextRow> rows = {{"", {"eaves", "limit", "ratio", "memory", "workspace"}}};
  for_each_row(std::span(&measured, 1), [&](const Table& table, const Row& row, const Measurement& measurement) {
    rows.push_back({.name = join(row, table, false), .note = measurement.skipped, .is_busy = measurement.is_busy});
    if (!measurement.skipped.empty()) return;
    const double eaves = measurement.eaves->median_ms, limit = measurement.limit->median_ms;
    for (const double number : {eaves, limit, eaves / limit, static_cast<double>(measurement.peak_bytes) / kMiB,
                                static_cast<double>(measurement.workspace_bytes) / kMiB}) {
      rows.back().cells.push_back(three_digits(number));
    }
  });
  const bool has_numbers =
      std::any_of(rows.begin() + 1, rows.end(), [](const TextRow& row) { return !row.cells.empty(); });
  if (!has_numbers) rows.erase(rows.begin());  // the heads of the columns
  const Table& table = measured.table;
  return layout(fmt::format("{} {}, {}", table.op, join(table.rows.front(), table, true), name_of(table.dtype)), rows);
}

std::string summary(const std::vector<MeasuredTable>& run) {
  struct Group {
    std::string name;
    std::vector<double> ratios;
    std::string worst;
  };
  std::vector<Group> groups;
  int busy = 0, all = 0;
  for_each_row(run, [&](const Table& table, const Row& row, const Measurement& measurement) {
    if (!measurement.eaves || !measurement.limit) return;
    ++all;
    busy += measurement.is_busy;
    const std::string name = table.op + ", " + words_of_mode(row.mode);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& any) { return any.name == name; });
    if (group == groups.end()) group = groups.insert(group, {name, {}, ""});
    if (measurement.is_busy) return;
    const double ratio = measurement.eaves->median_ms / measurement.limit->median_ms;
    if (group->ratios.empty() || ratio > group->ratios.back()) {
      const Words words = words_of(row);  // words[0] is the mode
      group->worst =
          fmt::format("worst: {}, {}", fmt::join(words.begin() + 1, words.end(), ", "), name_of(table.dtype));
    }
    group->ratios.insert(std::upper_bound(group->ratios.begin(), group->ratios.end(), ratio), ratio);
  });
  if (groups.empty()) return "";
  std::vector<TextRow> rows = {{"", {"rows", "median", "worst"}}};
  for (const auto& [name, ratios, worst] : groups) {
    const std::size_t count = ratios.size();
    const auto number = [&](std::size_t i) { return count == 0 ? "-" : three_digits(ratios[i]); };
    rows.push_back({name, {std::to_string(count), number(count / 2), number(count - 1)}, worst});
  }
  std::string text = layout("summary: eaves / limit", rows);
  if (busy > 0) {
    text += '\n' + wrap(fmt::format("Other programs slowed down {} of {} rows (busy), which the summary leaves out.{}",
                                    busy, all, 2 * busy > all ? " Measure again on a quiet machine." : ""));
  }
  return text;
}

std::string result_json(const std::vector<MeasuredTable>& tables, Device device, int threads, bool is_stopped) {
  const SystemInfo system = system_info();
  const bool is_gpu = device.type == DeviceType::cuda;
  nlohmann::ordered_json json = {{"schema", 1}, {"device", runtime::device_name(device)}};
  json["cuda"] = is_gpu ? nlohmann::ordered_json(system.cuda_build_version) : nullptr;
  json["driver"] = is_gpu ? nlohmann::ordered_json(system.cuda_driver_version) : nullptr;
  if (!is_gpu) {
    json["cpu_level"] = system.cpu_level;
    json["threads"] = threads > 0 ? threads : system.cpu_threads;
  }
  json["commit"] = system.commit;
  json["date"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  json["protocol"] = "kernel";
  if (is_stopped) json["stopped"] = true;
  json["rows"] = nlohmann::ordered_json::array();
  for_each_row(tables, [&](const Table& table, const Row& row, const Measurement& measurement) {
    for (const bool is_eaves : {true, false}) json["rows"].push_back(result_row(table, row, measurement, is_eaves));
  });
  return json.dump(1) + "\n";
}

}  // namespace eaves::bench
