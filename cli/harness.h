// The measurement: takes rows that operators declare, and returns times and bytes. It knows no operator, prints nothing
// and has the only timing code of the program.
//
// One repetition reads a buffer larger than the last cache, runs the operator, reads the buffer again and runs the
// limit: a plain kernel that streams the bytes that the row declares, or the row's own limit. Operator and limit
// alternate, and so see the same cold cache and the same clock frequency. On a GPU all repetitions are enqueued before
// the first is waited for, with a pair of events around each call. Reading the buffer takes longer than a launch, so
// that no call waits for its launch. A call that overwrites its inputs gets them back at the start of a repetition;
// that waits, but before the buffer is read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/runtime.h"
#include "testing/benchmark.h"

namespace eaves::bench {

struct HarnessOptions {
  Device device = kCpu;
  int threads = 0;             ///< CPU: 0 is every core
  int repetitions = 30;        ///< of each row; slow rows get fewer, at least kMinimumRepetitions
  double warm_up_ms = 500.0;   ///< before each table: the time for clocks to settle
  std::int64_t max_bytes = 0;  ///< rows that read and write more are left out; 0: none
  double row_ms = 0.0;         ///< about the time of a row, one repetition at least; 0: kSlowRowMs
};

struct Timing {
  double median_ms = 0.0;
  double min_ms = 0.0;
  double max_ms = 0.0;
  int repetitions = 0;
};

/// The result of one row: `skipped` says why it was not measured, or both timings are present.
struct Measurement {
  std::string skipped = {};
  std::optional<Timing> eaves = {};
  std::optional<Timing> limit = {};
  std::int64_t peak_bytes = 0;  ///< inputs, outputs and workspace of one call
  std::int64_t workspace_bytes = 0;
  bool is_busy = false;  ///< other programs slowed the row down: see mark_busy_rows() in report.h
};

class Harness {
 public:
  explicit Harness(const HarnessOptions& options);

  /// Runs the device until its clocks have settled, once per table. Throws cli::Stopped if the program is to stop.
  void warm_up();

  /// Throws cli::Stopped between two repetitions if the program is to stop.
  Measurement measure(const Row& row);

 private:
  struct Buffers;

  Buffers make_buffers(const Row& row) const;
  Measurement time(Buffers& buffers);
  void flush_cache();

  HarnessOptions options_;
  runtime::Stream stream_;
  ExecutionContext context_;
  Arena cache_arena_;
  TensorView cache_flush_;
  std::size_t cache_flush_bytes_ = 0;
};

}  // namespace eaves::bench
