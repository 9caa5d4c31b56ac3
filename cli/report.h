// What `eaves bench` shows and keeps: tables in the layout of the published measurements (title, column heads, one
// row per length with an index before it), and the result file in JSON. Formatting only.
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

/// Milliseconds: eaves, limit, and eaves / limit. Rows that a busy machine slowed down are marked, by what the limits
/// of the run so far, with this table, have reached.
std::string speed_table(const MeasuredTable& measured, const std::vector<MeasuredTable>& run);

/// What the marks in the speed tables of a run mean; nothing where there is none.
std::string marks_legend(const std::vector<MeasuredTable>& run);

/// MiB: peak with inputs and outputs counted, and the workspace alone.
std::string memory_table(const MeasuredTable& measured);

/// The result file, schema 1. That of a stopped run, which lacks rows, says so.
std::string result_json(const std::vector<MeasuredTable>& tables, Device device, int threads, bool is_stopped);

}  // namespace eaves::bench
