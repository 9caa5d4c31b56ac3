// The measurement: takes rows that operators declare and returns times and bytes. It knows no operator, prints nothing
// and has the only timing code of the program.
//
// One repetition is: read a buffer larger than the last cache, run the operator, read it again, run the limit (a
// plain kernel that streams the bytes that the row declares, or what the row brings in its place). So operator and
// limit see the same cold cache and the same clock frequency, alternating. On a GPU all repetitions are enqueued
// before any is waited for, with a pair of events around each call: reading the buffer takes longer than a launch,
// which therefore is never waited for. A call that overwrites its inputs gets them back at the start of a repetition,
// which waits, but before that reading.
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
  int repetitions = 30;        ///< of each row; slow rows get fewer, see kMinimumRepetitions
  double warm_up_ms = 500.0;   ///< per table: how long clocks get to settle
  std::int64_t max_bytes = 0;  ///< rows that read and write more than this are left out; 0: none
  double row_ms = 0.0;         ///< about how long a row may take, one repetition at least; 0: as long as five
};

struct Timing {
  double median_ms = 0.0;
  double min_ms = 0.0;
  double max_ms = 0.0;
  int repetitions = 0;
};

/// Of one row; either `skipped` says why there is nothing, or both timings are there.
struct Measurement {
  std::string skipped = {};
  std::optional<Timing> eaves = {};
  std::optional<Timing> limit = {};
  std::int64_t peak_bytes = 0;  ///< inputs, outputs and workspace of one call
  std::int64_t workspace_bytes = 0;
  std::string mark = {};  ///< "unsteady" or "slow": see mark_busy_rows() in report.h
};

class Harness {
 public:
  explicit Harness(const HarnessOptions& options);

  /// Runs the device until its clocks have settled. Once per table. Throws cli::Stopped once the program is to stop.
  void warm_up();

  /// Throws cli::Stopped between two repetitions once the program is to stop.
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
