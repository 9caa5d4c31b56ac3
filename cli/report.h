// The output of `eaves bench`: tables and a summary of 80 columns, and the result file in JSON. Formatting only.
#pragma once

#include <string>
#include <vector>

#include "cli/harness.h"
#include "testing/benchmark.h"

namespace eaves::bench {

/// A table and its measurements, row by row.
struct MeasuredTable {
  Table table;
  std::vector<Measurement> measurements;
};

/// Text in lines of at most 80 characters, broken at spaces. Lines after the first are indented by two more.
std::string wrap(const std::string& text, const std::string& first_indent = "");

/// Marks the rows of the last table that a busy machine slowed down, judged by the limits of the run so far.
void mark_busy_rows(std::vector<MeasuredTable>& run);

/// Milliseconds of eaves and of the limit, their ratio, MiB of inputs, outputs and workspace, MiB of the workspace
/// alone; "busy" behind a row that a busy machine slowed down. The title names the words that all rows share.
std::string text_table(const MeasuredTable& measured);

/// For each operator and mode the number of rows without a mark, the median and the largest eaves / limit, and the row
/// with the largest. Then one sentence that counts the rows with a mark, if there are any.
std::string summary(const std::vector<MeasuredTable>& run);

/// The result file, schema 1. The file of a stopped run lacks rows and says so.
std::string result_json(const std::vector<MeasuredTable>& tables, Device device, int threads, bool is_stopped);

}  // namespace eaves::bench
