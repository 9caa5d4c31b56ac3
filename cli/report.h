// What `eaves bench` shows and keeps: tables and a summary of 80 columns, and the result file in JSON. Formatting only.
#pragma once

#include <string>
#include <vector>

#include "cli/harness.h"
#include "testing/benchmark.h"

namespace eaves::bench {

/// A table and what was measured of it, row by row.
struct MeasuredTable {
  Table table;
  std::vector<Measurement> measurements;
};

/// Text in lines of at most 80 characters, broken at spaces; those behind the first are indented by two.
std::string wrap(const std::string& text, const std::string& first_indent = "");

/// Marks the rows of the last table that a busy machine slowed down, by what the limits of the run so far have reached.
void mark_busy_rows(std::vector<MeasuredTable>& run);

/// Milliseconds of eaves and limit, eaves / limit, MiB with inputs and outputs counted, and of the workspace alone. The
/// title is what the rows have in common.
std::string text_table(const MeasuredTable& measured);

/// For each operator and mode the number of rows without a mark, the median and the largest eaves / limit, and the row
/// of the largest. Before it the number of rows left out for a mark, and whether most are.
std::string summary(const std::vector<MeasuredTable>& run);

/// The result file, schema 1. That of a stopped run, which lacks rows, says so.
std::string result_json(const std::vector<MeasuredTable>& tables, Device device, int threads, bool is_stopped);

}  // namespace eaves::bench
