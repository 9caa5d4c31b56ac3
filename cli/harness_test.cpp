// The harness and its tables, over an operator that exists only here.
#include "cli/harness.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "cli/report.h"
#include "core/numeric.h"
#include "eaves/error.h"

namespace eaves::bench {
namespace {

constexpr std::int64_t kInputBytes = 4096;
constexpr std::size_t kWorkspaceBytes = 512;

// Counts its runs and notes what it was given.
struct Log {
  int calls_made = 0;
  int runs = 0;
  std::size_t workspace_bytes = 0;
  bool has_workspace_memory = false;
};

class CountingCall : public Call {
 public:
  CountingCall(Arena& arena, Log& log) : log_(log) {
    arena.normal(DType::float32, {kInputBytes / 4}, 1);
    ++log_.calls_made;
  }
  std::size_t workspace_bytes(const ExecutionContext&) const override { return kWorkspaceBytes; }
  void run(const ExecutionContext& context) override {
    ++log_.runs;
    log_.workspace_bytes = context.workspace.bytes;
    log_.has_workspace_memory = context.workspace.data != nullptr;
  }

 private:
  Log& log_;
};

Row counting_row(Log& log) {
  Row row;
  row.axis_value = 1024;
  row.shape = {{"batch", 4}, {"n", 1024}};
  row.read_bytes = kInputBytes;
  row.write_bytes = 256;
  row.make_call = [&log](Arena& arena) { return std::make_unique<CountingCall>(arena, log); };
  return row;
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
  // A slow machine stops after the time that a row may take, but not before 5.
  EXPECT_GE(measurement.eaves->repetitions, 5);
  EXPECT_LE(measurement.eaves->repetitions, 6);
  EXPECT_LE(measurement.eaves->min_ms, measurement.eaves->median_ms);
  EXPECT_LE(measurement.eaves->median_ms, measurement.eaves->max_ms);
  EXPECT_GE(log.runs, measurement.eaves->repetitions + 3);
  EXPECT_GE(log.calls_made, 2) << "inputs that fit in the cache come in several sets";
  EXPECT_EQ(log.workspace_bytes, kWorkspaceBytes);
  EXPECT_TRUE(log.has_workspace_memory);
  EXPECT_EQ(measurement.workspace_bytes, static_cast<std::int64_t>(kWorkspaceBytes));
  EXPECT_EQ(measurement.peak_bytes, kInputBytes + static_cast<std::int64_t>(kWorkspaceBytes)) << "of one set";
}

TEST(Harness, TheTimeOfACallIsWhatTheCallTakes) {
  struct SleepingCall : Call {
    std::size_t workspace_bytes(const ExecutionContext&) const override { return 0; }
    void run(const ExecutionContext&) override { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
  };
  Log log;
  Row row = counting_row(log);
  row.make_call = [](Arena&) { return std::make_unique<SleepingCall>(); };
  const Measurement measurement = Harness(fast_options()).measure(row);
  ASSERT_TRUE(measurement.eaves.has_value());
  EXPECT_GE(measurement.eaves->min_ms, 5.0);
}

TEST(Harness, InputsThatACallOverwritesArePutBackBeforeItRunsAgain) {
  struct OverwritingCall : Call {
    explicit OverwritingCall(int& runs, int& bad_runs) : runs(runs), bad_runs(bad_runs) {}
    std::size_t workspace_bytes(const ExecutionContext&) const override { return 0; }
    void run(const ExecutionContext&) override {
      ++runs;
      bad_runs += is_overwritten;
      is_overwritten = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    void restore() override {
      is_overwritten = false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    bool is_overwritten = false;
    int& runs;
    int& bad_runs;
  };
  Log log;
  for (const std::int64_t bytes : {kInputBytes, std::int64_t{1} << 30}) {  // in several sets, and in one
    int runs = 0, bad_runs = 0;
    Row row = counting_row(log);
    row.make_call = [&](Arena& arena) {
      arena.allocate(static_cast<std::size_t>(bytes));
      return std::make_unique<OverwritingCall>(runs, bad_runs);
    };
    const Measurement measurement = Harness(fast_options()).measure(row);
    EXPECT_EQ(bad_runs, 0);
    EXPECT_GE(runs, 8);
    ASSERT_TRUE(measurement.eaves.has_value());
    EXPECT_LT(measurement.eaves->min_ms, 20.0) << "putting back is not timed";
  }
}

// What a row may bring for the column `limit`.
struct LimitLog {
  int made = 0;
  int runs = 0;
  bool has_workspace = false;
};

class SleepingLimit : public Call {
 public:
  SleepingLimit(Arena& arena, LimitLog& log) : log_(log) {
    arena.allocate(kInputBytes);
    ++log_.made;
  }
  std::size_t workspace_bytes(const ExecutionContext&) const override { return 0; }
  void run(const ExecutionContext& context) override {
    ++log_.runs;
    log_.has_workspace = context.workspace.data != nullptr;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

 private:
  LimitLog& log_;
};

TEST(Harness, ARowMayBringALimitThatRunsInsteadOfStreaming) {
  Log log;
  LimitLog limit;
  Row row = counting_row(log);
  row.make_limit = [&](Arena& arena) { return std::make_unique<SleepingLimit>(arena, limit); };
  row.limit_bytes = kInputBytes;
  const Measurement measurement = Harness(fast_options()).measure(row);
  ASSERT_TRUE(measurement.limit.has_value()) << measurement.skipped;
  EXPECT_GE(measurement.limit->min_ms, 5.0);
  EXPECT_EQ(limit.runs, log.runs) << "one after the other";
  EXPECT_EQ(limit.made, log.calls_made) << "on buffers of their own in each set";
  EXPECT_FALSE(limit.has_workspace) << "that of the call is not its";
  EXPECT_EQ(measurement.peak_bytes, kInputBytes + static_cast<std::int64_t>(kWorkspaceBytes)) << "of the call alone";
}

TEST(Harness, RowWhoseLimitDoesNotFitSaysSoAndIsNotMade) {
  Log log;
  LimitLog limit;
  Row row = counting_row(log);
  row.make_limit = [&](Arena& arena) { return std::make_unique<SleepingLimit>(arena, limit); };
  row.limit_bytes = std::int64_t{1} << 60;
  const Measurement measurement = Harness(fast_options()).measure(row);
  EXPECT_EQ(measurement.skipped.rfind("does not fit in memory: needs 1048576.0 TiB, ", 0), 0u) << measurement.skipped;
  EXPECT_EQ(log.calls_made + limit.made, 0);
}

TEST(Harness, RowWhoseLimitIsNotSupportedSaysSo) {
  Log log;
  Row row = counting_row(log);
  row.make_limit = [](Arena&) -> std::unique_ptr<Call> { throw Unsupported("there is no library of products"); };
  EXPECT_EQ(Harness(fast_options()).measure(row).skipped, "not supported: there is no library of products");
}

TEST(Harness, RowThatDoesNotFitSaysSoAndIsNotMade) {
  Log log;
  Row row = counting_row(log);
  row.read_bytes = std::int64_t{1} << 60;
  const Measurement measurement = Harness(fast_options()).measure(row);
  EXPECT_EQ(measurement.skipped.rfind("does not fit in memory: needs 2097152.0 TiB, ", 0), 0u) << measurement.skipped;
  EXPECT_FALSE(measurement.eaves || measurement.limit);
  EXPECT_EQ(log.calls_made, 0);
}

TEST(Harness, RowThatCannotBeSetUpSaysWhatTheDeviceSaid) {
  Log log;
  Row row = counting_row(log);
  row.make_call = [](Arena&) -> std::unique_ptr<Call> { throw DeviceError("out of memory: 5 bytes"); };
  EXPECT_EQ(Harness(fast_options()).measure(row).skipped, "could not be set up: out of memory: 5 bytes");
}

TEST(Harness, RowAboveMaxBytesIsLeftOut) {
  Log log;
  HarnessOptions options = fast_options();
  options.max_bytes = 4096;
  EXPECT_EQ(Harness(options).measure(counting_row(log)).skipped,
            "left out: moves 4352 bytes, more than the 4096 of --max-bytes");
}

TEST(Harness, FailureWhileRunningIsNotHiddenInTheTable) {
  class FailingCall : public Call {
   public:
    std::size_t workspace_bytes(const ExecutionContext&) const override { return 0; }
    void run(const ExecutionContext&) override { throw DeviceError("launch failed"); }
  };
  Log log;
  Row row = counting_row(log);
  row.make_call = [](Arena&) { return std::make_unique<FailingCall>(); };
  EXPECT_THROW(Harness(fast_options()).measure(row), DeviceError);
}

MeasuredTable example_table() {
  MeasuredTable measured;
  measured.table.op = "example";
  measured.table.mode = "fwd";
  measured.table.title_suffix = "batch4-bf16";
  measured.table.axis_name = "n";
  for (const std::int64_t n : {1024, 131072, 262144}) {
    Row row;
    row.axis_value = n;
    row.shape = {{"batch", 4}, {"n", n}};
    row.read_bytes = 1'000'000;
    measured.table.rows.push_back(row);
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

TEST(Report, TablesHaveTheLayoutOfThePublishedOnes) {
  EXPECT_EQ(speed_table(example_table(), {}),
            "example-speed-fwd-batch4-bf16:\n"
            "          n     eaves     limit  ratio\n"
            "0    1024.0  0.500000  0.250000  2.000\n"
            "1  131072.0  0.500000  0.250000  2.000\n"
            "2  262144.0  does not fit in memory: needs 3.0 GiB, 1.2 GiB free\n");
  EXPECT_EQ(memory_table(example_table()),
            "example-memory-fwd-batch4-bf16:\n"
            "          n     eaves  workspace\n"
            "0    1024.0  1.500000   0.500000\n"
            "1  131072.0  1.500000   0.500000\n"
            "2  262144.0  does not fit in memory: needs 3.0 GiB, 1.2 GiB free\n");
}

TEST(Report, RowsThatTheAxisDoesNotTellApartAreNamed) {
  MeasuredTable measured = example_table();
  measured.table.rows[1].options = {{"axes", "[0]"}};
  EXPECT_NE(speed_table(measured, {}).find("2.000  batch=4 axes=[0]\n"), std::string::npos)
      << speed_table(measured, {});
}

TEST(Report, AnOptionThatEveryRowHasIsLeftToTheTitle) {
  MeasuredTable measured = example_table();
  for (Row& row : measured.table.rows) row.options = {{"reduction", "\"mean\""}};
  EXPECT_EQ(speed_table(measured, {}), speed_table(example_table(), {}));
  measured.table.rows[1].options.emplace_back("softcap", "30");
  EXPECT_NE(speed_table(measured, {}).find("2.000  batch=4 softcap=30\n"), std::string::npos)
      << speed_table(measured, {});
  EXPECT_EQ(speed_table(measured, {}).find("reduction"), std::string::npos) << speed_table(measured, {});
}

TEST(Report, RowsOfABusyMachineAreMarkedAndExplainedOnce) {
  MeasuredTable quiet = example_table();
  EXPECT_EQ(marks_legend({quiet}), "");
  MeasuredTable busy = quiet;
  busy.measurements[0].eaves = Timing{0.9, 0.4, 1.0, 30};
  busy.table.rows[1].read_bytes = 20'000'000;
  busy.measurements[1].limit = Timing{4.1, 4.0, 4.2, 30};
  quiet.table.rows[1].read_bytes = 60'000'000;
  quiet.measurements[1].limit = Timing{5.9, 5.0, 6.0, 30};  // 12 MB in a millisecond; the busy row 5
  const std::string text = speed_table(busy, {quiet, busy});
  EXPECT_NE(text.find("unsteady, fastest 0.400 of 0.200\n"), std::string::npos) << text;
  EXPECT_NE(text.find("slow, fastest 0.400 of 4.000\n"), std::string::npos) << text;
  EXPECT_EQ(speed_table(busy, {busy}).find("slow"), std::string::npos) << "nothing says that it could be faster";
  const std::string legend = marks_legend({quiet, busy});
  EXPECT_EQ(legend.rfind("# rows of a busy machine: 1 unsteady (", 0), 0u) << legend;
  EXPECT_NE(legend.find(", 1 slow\n"), std::string::npos) << legend;
  EXPECT_NE(marks_legend({busy, quiet}).find(", 0 slow\n"), std::string::npos) << "its table was printed before";
}

TEST(Report, ProductsAreNotComparedWithStreamsNorWithThoseOfOtherTypes) {
  MeasuredTable streams = example_table(), products = example_table();
  streams.measurements[0].limit = products.measurements[0].limit = Timing{2.0, 2.0, 2.0, 30};
  products.table.rows[0].operations = 1'000'000'000;
  MeasuredTable others = products;
  others.table.dtype = DType::float32;
  others.table.rows[0].operations = 1'000'000;
  EXPECT_EQ(marks_legend({streams, products, others}), "");
  others.table.dtype = products.table.dtype;
  EXPECT_NE(marks_legend({streams, products, others}), "");
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
  // A block of a million numbers: its mean is off by 0.001 in one deviation.
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
