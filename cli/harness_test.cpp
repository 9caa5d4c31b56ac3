// The harness and its tables, over an operator that only this test has.
#include "cli/harness.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/report.h"
#include "core/numeric.h"
#include "eaves/error.h"

namespace eaves::bench {
namespace {

constexpr std::int64_t kInputBytes = 4096;
constexpr std::size_t kWorkspaceBytes = 512;

// A record of the calls.
struct Log {
  int calls_made = 0;
  int runs = 0;
  Workspace workspace;
};

/// A call that records its context and does `work`.
template <typename Work = void (*)()>
Row counting_row(
    Log& log, Work work = [] {}) {
  Row row{.mode = "fwd", .shape = {{"batch", 4}, {"n", 1024}}, .read_bytes = kInputBytes, .write_bytes = 256};
  row.make_call = [&log, work](Arena& arena) {
    arena.normal(DType::float32, {kInputBytes / 4}, 1);
    ++log.calls_made;
    const auto run = [&log, work](const ExecutionContext& context) {
      ++log.runs;
      log.workspace = context.workspace;
      work();
    };
    return Call{.run = run, .workspace_bytes = [](const ExecutionContext&) { return kWorkspaceBytes; }};
  };
  return row;
}

/// Gives the row a limit of its own that records the same.
void add_limit(Row& row, Log& log) {
  row.make_limit = [&log](Arena& arena) {
    arena.allocate(kInputBytes);
    ++log.calls_made;
    return Call{.run = [&log](const ExecutionContext& context) {
      ++log.runs;
      log.workspace = context.workspace;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }};
  };
  row.limit_bytes = kInputBytes;
}

HarnessOptions fast_options() {
  HarnessOptions options;
  options.repetitions = 6;
  options.warm_up_ms = 0.0;
  return options;
}

TEST(Harness, RunsWarmUpsAndRepetitionsOnRotatedBuffersWithAWorkspace) {
  Log log;
  Harness harness(fast_options());
  const Measurement measurement = harness.measure(counting_row(log));
  EXPECT_EQ(measurement.skipped, "");
  ASSERT_TRUE(measurement.eaves && measurement.limit);
  // A slow machine stops when the row's time is over, but not before 5 repetitions.
  EXPECT_GE(measurement.eaves->repetitions, 5);
  EXPECT_LE(measurement.eaves->repetitions, 6);
  EXPECT_LE(measurement.eaves->min_ms, measurement.eaves->median_ms);
  EXPECT_LE(measurement.eaves->median_ms, measurement.eaves->max_ms);
  EXPECT_GE(log.runs, measurement.eaves->repetitions + 3);
  EXPECT_GE(log.calls_made, 2) << "inputs that fit in the cache come in several sets";
  EXPECT_EQ(log.workspace.bytes, kWorkspaceBytes);
  EXPECT_NE(log.workspace.data, nullptr);
  EXPECT_EQ(measurement.workspace_bytes, static_cast<std::int64_t>(kWorkspaceBytes));
  EXPECT_EQ(measurement.peak_bytes, kInputBytes + static_cast<std::int64_t>(kWorkspaceBytes)) << "of one set";
}

TEST(Harness, TheTimeOfACallIsWhatTheCallTakes) {
  Log log;
  const Row row = counting_row(log, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  const Measurement measurement = Harness(fast_options()).measure(row);
  ASSERT_TRUE(measurement.eaves.has_value());
  EXPECT_GE(measurement.eaves->min_ms, 5.0);
}

TEST(Harness, ARowWithATimeMeasuresASlowCallOnceAndAFastOneOften) {
  Log log;
  HarnessOptions options = fast_options();
  options.row_ms = 300.0;
  const Row slow = counting_row(log, [] { std::this_thread::sleep_for(std::chrono::milliseconds(101)); });
  Measurement measurement = Harness(options).measure(slow);
  EXPECT_EQ(log.runs, 1);
  ASSERT_TRUE(measurement.eaves && measurement.limit);
  EXPECT_EQ(measurement.eaves->repetitions, 1);
  EXPECT_GE(measurement.eaves->median_ms, 101.0);
  EXPECT_EQ(measurement.peak_bytes, kInputBytes + static_cast<std::int64_t>(kWorkspaceBytes));
  options.row_ms = 60000.0;
  measurement = Harness(options).measure(counting_row(log));
  ASSERT_TRUE(measurement.eaves.has_value()) << measurement.skipped;
  EXPECT_EQ(measurement.eaves->repetitions, 6);
}

TEST(Harness, InputsThatACallOverwritesArePutBackBeforeItRunsAgain) {
  for (const std::int64_t bytes : {kInputBytes, std::int64_t{1} << 30}) {  // for several sets, and for one
    int runs = 0, bad_runs = 0;
    Log log;
    Row row = counting_row(log);
    row.make_call = [&](Arena& arena) {
      arena.allocate(static_cast<std::size_t>(bytes));
      const auto is_overwritten = std::make_shared<bool>(false);
      const auto run = [&, is_overwritten](const ExecutionContext&) {
        ++runs;
        bad_runs += *is_overwritten;
        *is_overwritten = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      const auto restore = [is_overwritten] {
        *is_overwritten = false;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      };
      return Call{.run = run, .restore = restore};
    };
    const Measurement measurement = Harness(fast_options()).measure(row);
    EXPECT_EQ(bad_runs, 0);
    EXPECT_GE(runs, 8);
    ASSERT_TRUE(measurement.eaves.has_value());
    EXPECT_LT(measurement.eaves->min_ms, 20.0) << "putting back is not timed";
  }
}

TEST(Harness, ARowMayBringALimitThatRunsInsteadOfStreaming) {
  Log log, limit;
  Row row = counting_row(log);
  add_limit(row, limit);
  const Measurement measurement = Harness(fast_options()).measure(row);
  ASSERT_TRUE(measurement.limit.has_value()) << measurement.skipped;
  EXPECT_GE(measurement.limit->min_ms, 5.0);
  EXPECT_EQ(limit.runs, log.runs) << "one after the other";
  EXPECT_EQ(limit.calls_made, log.calls_made) << "on buffers of their own in each set";
  EXPECT_EQ(limit.workspace.data, nullptr) << "that of the call is not its";
  EXPECT_EQ(measurement.peak_bytes, kInputBytes + static_cast<std::int64_t>(kWorkspaceBytes)) << "of the call alone";
}

TEST(Harness, ARowThatCannotBeMeasuredSaysWhy) {
  Log log;
  const auto expect_skipped = [&](const Row& row, const std::string& reason, std::int64_t max_bytes = 0) {
    HarnessOptions options = fast_options();
    options.max_bytes = max_bytes;
    const Measurement measurement = Harness(options).measure(row);
    EXPECT_EQ(measurement.skipped.rfind(reason, 0), 0u) << measurement.skipped;
    EXPECT_FALSE(measurement.eaves || measurement.limit);
    EXPECT_EQ(log.runs, 0);
  };
  Row too_large = counting_row(log), limit_too_large = counting_row(log);
  too_large.read_bytes = std::int64_t{1} << 60;
  expect_skipped(too_large, "does not fit in memory: needs 2097152.0 TiB, ");
  add_limit(limit_too_large, log);
  limit_too_large.limit_bytes = std::int64_t{1} << 60;
  expect_skipped(limit_too_large, "does not fit in memory: needs 1048576.0 TiB, ");
  expect_skipped(counting_row(log), "skipped: it moves 4.2 KiB, more than --max-bytes 4.0 KiB", 4096);
  EXPECT_EQ(log.calls_made, 0);

  Row without_limit = counting_row(log), without_memory = counting_row(log);
  without_limit.make_limit = [](Arena&) -> Call { throw Unsupported("there is no library of products"); };
  expect_skipped(without_limit, "not supported: there is no library of products");
  without_memory.make_call = [](Arena&) -> Call { throw DeviceError("out of memory: 5 bytes"); };
  expect_skipped(without_memory, "its setup failed: out of memory: 5 bytes");
}

TEST(Harness, FailureWhileRunningIsNotHiddenInTheTable) {
  Log log;
  const Row row = counting_row(log, [] { throw DeviceError("launch failed"); });
  EXPECT_THROW(Harness(fast_options()).measure(row), DeviceError);
}

MeasuredTable example_table() {
  MeasuredTable measured{.table = {.op = "example"}};
  for (const std::int64_t n : {1024, 131072, 262144}) {
    measured.table.rows.push_back({.mode = "fwd", .shape = {{"batch", 4}, {"n", n}}, .read_bytes = 1'000'000});
  }
  Measurement fits;
  fits.eaves = Timing{0.5, 0.4, 0.6, 30};
  fits.limit = Timing{0.25, 0.2, 0.3, 30};
  fits.peak_bytes = std::int64_t{3} << 19;
  fits.workspace_bytes = std::int64_t{1} << 19;
  Measurement skipped;
  skipped.skipped = "does not fit in memory: needs 3.0 GiB, 1.2 GiB free";
  measured.measurements = {fits, fits, skipped};
  return measured;
}

TEST(Report, WhatRowsHaveInCommonIsTheTitleAndTheRestTheirNames) {
  MeasuredTable measured = example_table();
  EXPECT_EQ(text_table(measured),
            "example forward, batch 4, bfloat16\n"
            "          eaves  limit  ratio  memory  workspace\n"
            "n 1024    0.500  0.250   2.00    1.50      0.500\n"
            "n 131072  0.500  0.250   2.00    1.50      0.500\n"
            "n 262144: does not fit in memory: needs 3.0 GiB, 1.2 GiB free\n");
  MeasuredTable skipped = measured;
  for (Measurement& row : skipped.measurements) row = measured.measurements[2];
  EXPECT_EQ(text_table(skipped).find("eaves"), std::string::npos) << "no columns without a number";
  for (Row& row : measured.table.rows) row.options = {{"reduction", "\"mean\""}};
  measured.table.rows[1].options.emplace_back("argmax", "true");
  measured.table.rows[2].mode = "fwd+bwd";
  measured.table.dtype = DType::float32;
  measured.measurements[1].eaves = Timing{1234.5, 1234.0, 1235.0, 30};
  EXPECT_EQ(text_table(measured),
            "example batch 4, reduction mean, float32\n"
            "                           eaves  limit  ratio  memory  workspace\n"
            "forward, n 1024            0.500  0.250   2.00    1.50      0.500\n"
            "forward, n 131072, argmax   1234  0.250   4938    1.50      0.500\n"
            "forward and backward, n 262144: does not fit in memory: needs 3.0 GiB, 1.2 GiB\n"
            "  free\n");
}

TEST(Report, NoLineIsLongerThan80Columns) {
  MeasuredTable measured = example_table();
  for (std::int64_t i = 0; i < 3; ++i) {
    auto& options = measured.table.rows[static_cast<std::size_t>(i)].options;
    for (const char* key : {"activation_dim", "label_smoothing", "ignored_rows", "extra_tokens"}) {
      options.emplace_back(key, std::to_string(i));
      options.emplace_back(std::string("common_") + key, "1");
    }
  }
  measured.measurements[0].is_busy = true;
  std::istringstream lines(text_table(measured) + summary({measured}));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
}

TEST(Report, RowsOfABusyMachineAreMarkedAndExplainedOnce) {
  const auto marks = [](std::vector<MeasuredTable> run) {
    for (std::size_t count = 1; count <= run.size(); ++count) {  // marks each table as the run reaches it
      std::vector<MeasuredTable> so_far(run.begin(), run.begin() + static_cast<std::ptrdiff_t>(count));
      mark_busy_rows(so_far);
      run[count - 1] = so_far.back();
    }
    return run;
  };
  const MeasuredTable quiet = example_table();
  EXPECT_EQ(summary(marks({quiet})).find("Other"), std::string::npos);
  MeasuredTable busy = quiet, fast = quiet;
  busy.measurements[0].eaves = Timing{0.9, 0.4, 1.0, 30};
  busy.table.rows[1].read_bytes = 20'000'000;
  busy.measurements[1].limit = Timing{4.1, 4.0, 4.2, 30};
  fast.table.rows[1].read_bytes = 60'000'000;
  fast.measurements[1].limit = Timing{5.9, 5.0, 6.0, 30};  // 12 MB in a millisecond; the busy row has 5
  const auto run = marks({fast, busy});
  const std::string text = text_table(run[1]);
  EXPECT_EQ(text,
            "example forward, batch 4, bfloat16\n"
            "          eaves  limit  ratio  memory  workspace\n"
            "n 1024    0.900  0.250   3.60    1.50      0.500 busy\n"
            "n 131072  0.500   4.10  0.122    1.50      0.500 busy\n"
            "n 262144: does not fit in memory: needs 3.0 GiB, 1.2 GiB free\n");
  EXPECT_EQ(text_table(quiet).find("busy"), std::string::npos);
  const std::string with_busy = summary(run), all_busy = summary({run[1]});
  EXPECT_TRUE(with_busy.ends_with("\n\nOther programs slowed down 2 of 4 rows (busy), which the summary leaves out.\n"))
      << with_busy;
  EXPECT_NE(with_busy.find("\nexample, forward     2 "), std::string::npos) << with_busy;
  EXPECT_NE(all_busy.find("slowed down 2 of 2 rows (busy), which the summary leaves out.\n  Measure again on a quiet"),
            std::string::npos)
      << all_busy;
  EXPECT_NE(all_busy.find("\nexample, forward     0       -      -\n"), std::string::npos) << all_busy;
  EXPECT_FALSE(marks({busy, fast})[0].measurements[1].is_busy) << "no faster limit was known then";

  // Products are not compared with streams, nor with products of other dtypes.
  MeasuredTable streams = quiet, products = quiet;
  streams.measurements[0].limit = products.measurements[0].limit = Timing{2.0, 2.0, 2.0, 30};
  products.table.rows[0].operations = 1'000'000'000;
  MeasuredTable others = products;
  others.table.rows[0].operations = 1'000'000;
  EXPECT_TRUE(marks({streams, products, others})[2].measurements[0].is_busy);
  MeasuredTable spread = others;
  spread.table.rows[0].options = {{"data", "\"spread\""}};
  EXPECT_FALSE(marks({products, spread})[1].measurements[0].is_busy) << "subnormal numbers make it slow";
  others.table.dtype = DType::float32;
  for (const MeasuredTable& table : marks({streams, products, others})) EXPECT_FALSE(table.measurements[0].is_busy);
}

TEST(Report, TheSummaryHasTheMedianAndTheWorstOfEachOperatorAndMode) {
  MeasuredTable forward = example_table(), backward = example_table();
  forward.table.rows[2].shape = {{"batch", 9}};
  forward.measurements[2] = forward.measurements[0];
  forward.measurements[1].eaves = Timing{1.0, 1.0, 1.0, 30};
  for (Row& row : backward.table.rows) row.mode = "bwd";
  EXPECT_EQ(summary({forward, backward}),
            "summary: eaves / limit\n"
            "                   rows  median  worst\n"
            "example, forward      3    2.00   4.00\n"
            "  worst: batch 4, n 131072, bfloat16\n"
            "example, backward     2    2.00   2.00\n"
            "  worst: batch 4, n 1024, bfloat16\n");
}

TEST(Report, ResultFileOfAStoppedRunSaysSo) {
  EXPECT_FALSE(nlohmann::json::parse(result_json({example_table()}, kCpu, 3, false)).contains("stopped"));
  EXPECT_EQ(nlohmann::json::parse(result_json({example_table()}, kCpu, 3, true))["stopped"], true);
}

TEST(Report, ResultFileHasARowForEavesAndOneForTheLimit) {
  MeasuredTable measured = example_table();
  measured.table.rows[0].options = {{"axes", "[0]"}};
  const auto json = nlohmann::json::parse(result_json({measured}, kCpu, 3, false));
  EXPECT_EQ(json["schema"], 1);
  EXPECT_EQ(json["protocol"], "kernel");
  EXPECT_EQ(json["threads"], 3);
  ASSERT_EQ(json["rows"].size(), 6u);
  const auto& eaves = json["rows"][0];
  const auto& limit = json["rows"][1];
  EXPECT_EQ(eaves["provider"], "eaves");
  EXPECT_EQ(limit["provider"], "limit");
  for (const char* key : {"op", "mode", "dtype", "shape", "options"}) EXPECT_EQ(eaves[key], limit[key]) << key;
  EXPECT_EQ(eaves["dtype"], "bf16");
  EXPECT_EQ(eaves["options"]["axes"], nlohmann::json::array({0}));
  EXPECT_EQ(eaves["ms"], 0.5);
  EXPECT_EQ(eaves["gbps"], 2.0);
  EXPECT_EQ(eaves["peak_mib"], 1.5);
  EXPECT_EQ(eaves["workspace_mib"], 0.5);
  EXPECT_TRUE(json["rows"][4]["ms"].is_null());
  EXPECT_EQ(json["rows"][4]["skipped"], "does not fit in memory: needs 3.0 GiB, 1.2 GiB free");
}

TEST(Report, ResultFileCountsOperationsWhereARowDeclaresThem) {
  MeasuredTable measured = example_table();
  measured.table.rows[0].operations = 3'000'000'000;
  const auto json = nlohmann::json::parse(result_json({measured}, kCpu, 3, false));
  EXPECT_EQ(json["rows"][0]["tflops"], 6.0);
  EXPECT_EQ(json["rows"][1]["tflops"], 12.0);
  EXPECT_FALSE(json["rows"][0].contains("gbps"));
  EXPECT_FALSE(json["rows"][2].contains("tflops"));
}

TEST(Arena, NumbersAreNormalAndDependOnTheSeedAlone) {
  Arena arena(kCpu);
  // Larger than one block of numbers, and odd, so that pieces and the last pair end unevenly.
  const std::int64_t count = (std::int64_t{3} << 20) + 7;
  const auto* first = static_cast<const float*>(arena.normal(DType::float32, {count}, 1).data);
  const auto* again = static_cast<const float*>(arena.normal(DType::float32, {count}, 1).data);
  const auto* other = static_cast<const float*>(arena.normal(DType::float32, {count}, 2).data);
  EXPECT_EQ(arena.bytes(), 3 * count * 4);
  EXPECT_EQ(std::memcmp(first, again, static_cast<std::size_t>(count) * 4), 0);
  EXPECT_NE(std::memcmp(first, other, static_cast<std::size_t>(count) * 4), 0);
  double sum = 0.0, sum_of_squares = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += first[i];
    sum_of_squares += static_cast<double>(first[i]) * first[i];
  }
  // The mean of a block of a million numbers has a standard deviation of 0.001.
  EXPECT_NEAR(sum / static_cast<double>(count), 0.0, 0.005);
  EXPECT_NEAR(sum_of_squares / static_cast<double>(count), 1.0, 0.01);
}

TEST(Arena, NormalNumbersHaveTheDeviationAskedFor) {
  Arena arena(kCpu);
  const auto* plain = static_cast<const float*>(arena.normal(DType::float32, {1000}, 1).data);
  const auto* narrow = static_cast<const float*>(arena.normal(DType::float32, {1000}, 1, 0.25).data);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(narrow[i], 0.25f * plain[i]) << i;
}

TEST(Arena, NormalNumbersThatAreIntegersAreRefused) {
  Arena arena(kCpu);
  EXPECT_THROW(arena.normal(DType::int32, {4}, 1), InvalidArgument);
}

TEST(Arena, NumbersAreRepeatedUntilATensorIsFull) {
  Arena arena(kCpu);
  const std::vector<double> numbers = {-100.0, 7.0, 4294967296.0};
  const TensorView integers = arena.filled(DType::int64, {2, 4}, numbers);
  EXPECT_EQ(arena.bytes(), 64);
  const auto* first = static_cast<const std::int64_t*>(integers.data);
  EXPECT_EQ(std::vector<std::int64_t>(first, first + 8),
            (std::vector<std::int64_t>{-100, 7, 4294967296, -100, 7, 4294967296, -100, 7}));
  const auto* flag = static_cast<const std::uint8_t*>(arena.filled(DType::boolean, {1}, numbers).data);
  EXPECT_EQ(*flag, 1) << "a bool is 0 or 1";
  const auto* rounded = static_cast<const bfloat16*>(arena.filled(DType::bfloat16, {2}, std::vector{1.0, 0.1}).data);
  EXPECT_EQ(to_float(rounded[1]), 0.10009765625f) << "to nearest";
  EXPECT_THROW(arena.filled(DType::float32, {1}, {}), InvalidArgument);
  EXPECT_EQ(arena.filled(DType::float32, {0}, {}).element_count(), 0);
}

}  // namespace
}  // namespace eaves::bench
