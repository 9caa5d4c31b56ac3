// See report.h.
#include "cli/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "eaves/system.h"
#include "runtime/runtime.h"
#include "testing/dtype_names.h"

namespace eaves::bench {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr std::size_t kWidth = 80;

// Three significant digits, and all digits of what is before the point.
std::string three_digits(double number) {
  if (number <= 0.0) return "0";
  return fmt::format("{:.{}f}", number, std::clamp(2 - static_cast<int>(std::floor(std::log10(number))), 0, 9));
}

struct TextRow {
  std::string name;
  std::vector<std::string> cells;
  std::string note = {};  // on lines of its own
};

// Names at the left, numbers in columns at the right; a name that leaves no room for the numbers has its own line.
std::string layout(const std::string& title, const std::vector<std::string>& heads, const std::vector<TextRow>& rows) {
  std::vector<std::size_t> widths;
  for (const std::string& head : heads) widths.push_back(head.size());
  for (const TextRow& row : rows) {
    for (std::size_t i = 0; i < row.cells.size(); ++i) widths[i] = std::max(widths[i], row.cells[i].size());
  }
  std::size_t room = kWidth, longest = 0;
  for (const std::size_t width : widths) room -= 2 + width;
  for (const TextRow& row : rows) {
    if (!row.cells.empty() && row.name.size() <= room) longest = std::max(longest, row.name.size());
  }
  const auto line = [&](const std::string& name, const std::vector<std::string>& cells) {
    std::string text = fmt::format("{:<{}}", name, longest);
    for (std::size_t i = 0; i < cells.size(); ++i) text += fmt::format("  {:>{}}", cells[i], widths[i]);
    return text + '\n';
  };
  std::string text = wrap(title) + line("", heads);
  for (const TextRow& row : rows) {
    if (row.cells.empty()) {
      text += wrap(row.name.empty() ? row.note : row.name + ": " + row.note);
      continue;
    }
    const bool has_own_line = row.name.size() > room;
    if (has_own_line) text += wrap(row.name);
    text += line(has_own_line ? "" : row.name, row.cells);
    if (!row.note.empty()) text += wrap(row.note, "  ");
  }
  return text;
}

// What a row is, in words: its mode, sizes, and options other than the defaults.
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

// Those of `words` that every row of the table has, or those that not every row has.
std::string join(const Words& words, const Table& table, bool is_common) {
  std::string text;
  for (const std::string& word : words) {
    const bool is_in_every_row = std::all_of(table.rows.begin(), table.rows.end(), [&](const Row& row) {
      const Words others = words_of(row);
      return std::find(others.begin(), others.end(), word) != others.end();
    });
    if (is_in_every_row == is_common) text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

// A busy machine, told by the times themselves: a median of more than twice the fastest repetition or, where not even
// the fastest found a quiet moment, a limit at less than half of what it has reached elsewhere in the run so far. Only
// limits of a millisecond and more are compared: shorter ones fit between two slices of the scheduler, and depend on
// their size. Nor are products of `spread` data: their gradients have subnormal numbers, which cost a CPU more.
// benchmarks/bench/tables.py has the first rule, for the times of any provider.
constexpr double kUsualFactor = 2.0;
constexpr double kComparedMs = 1.0;
constexpr const char* kMostAreBusy = "most rows are left out: these numbers are not usable, measure on a quiet machine";

// Bytes or operations in a millisecond of the fastest repetition; 0 where it is not compared.
double limit_rate(const Row& row, const Measurement& measurement) {
  if (!measurement.limit || measurement.limit->min_ms < kComparedMs) return 0.0;
  const bool is_spread = std::any_of(row.options.begin(), row.options.end(), [](const auto& option) {
    return option.first == "data" && option.second == "\"spread\"";
  });
  if (is_spread) return 0.0;
  const std::int64_t work = row.operations > 0 ? row.operations : row.read_bytes + row.write_bytes;
  return static_cast<double>(work) / measurement.limit->min_ms;
}

// Among rows that the same thing limits: memory, or products of one dtype.
double best_limit_rate(const std::vector<MeasuredTable>& run, bool has_operations, DType dtype) {
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
  nlohmann::ordered_json json = {{"op", table.op}, {"mode", row.mode}, {"dtype", short_name_of(table.dtype)}};
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
  MeasuredTable& last = run.back();
  for (std::size_t i = 0; i < last.measurements.size(); ++i) {
    Measurement& measurement = last.measurements[i];
    if (!measurement.eaves || !measurement.limit) continue;
    const Row& row = last.table.rows[i];
    const double rate = limit_rate(row, measurement);
    const auto is_unsteady = [](const Timing& timing) { return timing.median_ms > kUsualFactor * timing.min_ms; };
    if (rate > 0.0 && kUsualFactor * rate < best_limit_rate(run, row.operations > 0, last.table.dtype)) {
      measurement.mark = "slow";
    } else if (is_unsteady(*measurement.eaves) || is_unsteady(*measurement.limit)) {
      measurement.mark = "unsteady";
    }
  }
}

std::string text_table(const MeasuredTable& measured) {
  const Table& table = measured.table;
  std::vector<TextRow> rows;
  for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
    const Measurement& measurement = measured.measurements[i];
    TextRow row{.name = join(words_of(table.rows[i]), table, false), .note = measurement.skipped};
    if (measurement.skipped.empty()) {
      const double eaves = measurement.eaves->median_ms, limit = measurement.limit->median_ms;
      for (const double number : {eaves, limit, eaves / limit, static_cast<double>(measurement.peak_bytes) / kMiB,
                                  static_cast<double>(measurement.workspace_bytes) / kMiB}) {
        row.cells.push_back(three_digits(number));
      }
    }
    if (!measurement.mark.empty()) {
      row.note = fmt::format("{}: the fastest repetitions took {} and {}", measurement.mark,
                             three_digits(measurement.eaves->min_ms), three_digits(measurement.limit->min_ms));
    }
    rows.push_back(std::move(row));
  }
  const std::string title =
      fmt::format("{} {}, {}", table.op, join(words_of(table.rows.front()), table, true), name_of(table.dtype));
  return layout(title, {"eaves", "limit", "ratio", "memory", "workspace"}, rows);
}

std::string summary(const std::vector<MeasuredTable>& run) {
  struct Group {
    std::string name;
    std::vector<double> ratios;
    std::string worst;
  };
  std::vector<Group> groups;
  int unsteady = 0, slow = 0, all = 0;
  for (const MeasuredTable& measured : run) {
    for (std::size_t i = 0; i < measured.measurements.size(); ++i) {
      const Measurement& measurement = measured.measurements[i];
      const Row& row = measured.table.rows[i];
      if (!measurement.eaves || !measurement.limit) continue;
      ++all;
      unsteady += measurement.mark == "unsteady";
      slow += measurement.mark == "slow";
      const std::string name = measured.table.op + ", " + words_of_mode(row.mode);
      auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& any) { return any.name == name; });
      if (group == groups.end()) group = groups.insert(group, {name, {}, ""});
      if (!measurement.mark.empty()) continue;
      const double ratio = measurement.eaves->median_ms / measurement.limit->median_ms;
      if (group->ratios.empty() || ratio > *std::max_element(group->ratios.begin(), group->ratios.end())) {
        Words words = words_of(row);
        words.erase(words.begin());  // the mode
        group->worst = fmt::format("worst: {}, {}", fmt::join(words, ", "), name_of(measured.table.dtype));
      }
      group->ratios.push_back(ratio);
    }
  }
  std::string text;
  if (const int busy = unsteady + slow; busy > 0) {
    text =
        wrap(fmt::format("busy: {} of {} rows left out: {} unsteady (the median is more than twice the fastest "
                         "repetition), {} slow (even in the fastest the limit was less than half as fast as "
                         "elsewhere in the run until then)",
                         busy, all, unsteady, slow));
    if (2 * busy > all) text += wrap(kMostAreBusy);
    text += '\n';
  }
  if (groups.empty()) return text;
  std::vector<TextRow> rows;
  for (Group& group : groups) {
    if (group.ratios.empty()) {
      rows.push_back({group.name, {"0", "-", "-"}});
      continue;
    }
    std::sort(group.ratios.begin(), group.ratios.end());
    rows.push_back({group.name,
                    {std::to_string(group.ratios.size()), three_digits(group.ratios[group.ratios.size() / 2]),
                     three_digits(group.ratios.back())},
                    group.worst});
  }
  return text + layout("summary: eaves / limit", {"rows", "median", "worst"}, rows);
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
