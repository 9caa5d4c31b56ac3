// harness.h says what one repetition is, and why.
#include "cli/harness.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "cli/options.h"
#include "cli/stop.h"
#include "eaves/error.h"

namespace eaves::bench {
namespace {

// A row whose repetitions would take longer than this together gets fewer, but at least five.
constexpr double kSlowRowMs = 2000.0;
constexpr int kMinimumRepetitions = 5;
constexpr int kWarmUpCalls = 3;

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

std::size_t flush_bytes_for(Device device) {
  const std::size_t cache = runtime::last_cache_bytes(device);
  const bool is_gpu = device.type == DeviceType::cuda;
  // On a GPU the flush also hides the host's launches (about 10 us each), so it is never shorter than 256 MiB.
  const std::size_t wanted = is_gpu ? std::max<std::size_t>(4 * cache, std::size_t{256} << 20) : 2 * cache;
  const auto free = static_cast<std::size_t>(runtime::free_memory_bytes(device));
  return std::min(wanted, free / 4) / 256 * 256;
}

Timing summarize(std::vector<std::unique_ptr<runtime::Stopwatch>>& stopwatches) {
  std::vector<double> times;
  for (auto& stopwatch : stopwatches) times.push_back(stopwatch->elapsed_ms());
  std::sort(times.begin(), times.end());
  const std::size_t middle = times.size() / 2;
  const double median = times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2.0;
  return {median, times.front(), times.back(), static_cast<int>(times.size())};
}

std::vector<std::unique_ptr<runtime::Stopwatch>> make_stopwatches(Device device, int count) {
  std::vector<std::unique_ptr<runtime::Stopwatch>> stopwatches;
  for (int i = 0; i < count; ++i) stopwatches.push_back(std::make_unique<runtime::Stopwatch>(device));
  return stopwatches;
}

// The limit of rows without one of their own: streams the bytes that the row declares.
Call streaming(Arena& arena, const Row& row, std::uint64_t seed) {
  const TensorView source = arena.normal(DType::bfloat16, {(row.read_bytes + 1) / 2}, seed);
  const TensorView destination = arena.output(DType::uint8, {row.write_bytes});
  const auto read_bytes = static_cast<std::size_t>(row.read_bytes);
  const auto write_bytes = static_cast<std::size_t>(row.write_bytes);
  return {.run = [=](const ExecutionContext& context) {
    runtime::stream_bytes(source.device, source.data, read_bytes, destination.data, write_bytes, context);
  }};
}

}  // namespace

// The buffers of a row. If one set of inputs would fit in the cache there are several sets, taken in turn: a flush that
// misses some lines then leaves nothing useful.
struct Harness::Buffers {
  struct Set {
    explicit Set(Device device) : call_arena(device), limit_arena(device) {}
    Arena call_arena;
    Arena limit_arena;
    Call call;
    Call limit;
  };
  std::vector<std::unique_ptr<Set>> sets;
  std::unique_ptr<Arena> workspace_arena;
  Workspace workspace;
};

Harness::Harness(const HarnessOptions& options)
    : options_(options), stream_(options.device), cache_arena_(options.device) {
  context_.stream = stream_.handle();
  context_.threads = options.threads;
  cache_flush_bytes_ = flush_bytes_for(options.device);
  cache_flush_ = cache_arena_.normal(DType::bfloat16, {static_cast<std::int64_t>(cache_flush_bytes_ / 2)}, 1);
  runtime::synchronize(options.device);
}

void Harness::flush_cache() {
  // Reads, because dirty lines would be written back during the next measurement.
  void* no_destination = cache_flush_.data;  // 0 bytes are written to it
  runtime::stream_bytes(options_.device, cache_flush_.data, cache_flush_bytes_, no_destination, 0, context_);
}

void Harness::warm_up() {
  const double end = now_ms() + options_.warm_up_ms;
  while (now_ms() < end) {
    cli::check_stop();
    for (int i = 0; i < 10; ++i) flush_cache();
    runtime::synchronize(options_.device);
  }
}

Harness::Buffers Harness::make_buffers(const Row& row) const {
  Buffers buffers;
  const Device device = options_.device;
  const auto cache_bytes = static_cast<std::int64_t>(runtime::last_cache_bytes(device));
  std::int64_t wanted_sets = 1;
  for (std::int64_t i = 0; i < wanted_sets; ++i) {
    cli::check_stop();
    auto set = std::make_unique<Buffers::Set>(device);
    set->call = row.make_call(set->call_arena);
    set->limit = row.make_limit ? row.make_limit(set->limit_arena)
                                : streaming(set->limit_arena, row, static_cast<std::uint64_t>(2 + i));
    const std::int64_t set_bytes = std::max<std::int64_t>(1, set->call_arena.bytes() + set->limit_arena.bytes());
    buffers.sets.push_back(std::move(set));
    if (i == 0 && set_bytes < 2 * cache_bytes) {
      const std::int64_t affordable = runtime::free_memory_bytes(device) / 2 / set_bytes;
      wanted_sets = std::min(std::clamp<std::int64_t>(2 * cache_bytes / set_bytes, 2, 4), 1 + affordable);
    }
  }
  const Call& call = buffers.sets.front()->call;
  if (call.workspace_bytes) buffers.workspace.bytes = call.workspace_bytes(context_);
  buffers.workspace_arena = std::make_unique<Arena>(device);
  if (buffers.workspace.bytes > 0) buffers.workspace.data = buffers.workspace_arena->allocate(buffers.workspace.bytes);
  runtime::synchronize(device);
  return buffers;
}

Measurement Harness::measure(const Row& row) {
  Measurement result;
  const std::int64_t row_bytes = row.read_bytes + row.write_bytes;
  if (options_.max_bytes > 0 && row_bytes > options_.max_bytes) {
    result.skipped = fmt::format("skipped: it moves {}, more than --max-bytes {}", cli::format_bytes(row_bytes),
                                 cli::format_bytes(options_.max_bytes));
    return result;
  }
  const std::int64_t limit_bytes = row.make_limit ? row.limit_bytes : row_bytes;
  const std::int64_t needed = row_bytes + limit_bytes;  // the call and the limit have buffers of their own
  const std::int64_t free = runtime::free_memory_bytes(options_.device);
  if (needed > free) {
    result.skipped =
        fmt::format("does not fit in memory: needs {}, {} free", cli::format_bytes(needed), cli::format_bytes(free));
    return result;
  }
  std::optional<Buffers> buffers;
  try {
    buffers = make_buffers(row);
  } catch (const DeviceError& error) {
    result.skipped = fmt::format("its setup failed: {}", error.what());
    return result;
  } catch (const Unsupported& error) {
    result.skipped = fmt::format("not supported: {}", error.what());
    return result;
  }
  return time(*buffers);
}

Measurement Harness::time(Buffers& buffers) {
  const Device device = options_.device;
  ExecutionContext call_context = context_;
  call_context.workspace = buffers.workspace;
  const auto run_call = [&](Buffers::Set& set) { set.call.run(call_context); };
  const auto restore = [&](Buffers::Set& set) {
    if (set.call.restore) set.call.restore();
  };
  // Restores before the flush, which then evicts the restored lines from the cache.
  const auto restore_and_flush = [&](Buffers::Set& set) {
    restore(set);
    flush_cache();
  };
  const auto run_limit = [&](Buffers::Set& set) { set.limit.run(context_); };
  const auto measurement_of = [&](const Timing& call, const Timing& limit) {
    const auto workspace_bytes = static_cast<std::int64_t>(buffers.workspace.bytes);
    return Measurement{.eaves = call,
                       .limit = limit,
                       .peak_bytes = buffers.sets.front()->call_arena.bytes() + workspace_bytes,
                       .workspace_bytes = workspace_bytes};
  };

  // At least once on every set, because the first call on a buffer may fault its pages in. If a row has a time and one
  // call takes most of it, that call is the measurement; on a GPU never the first call, which also loads kernels and
  // libraries.
  const bool has_time = options_.row_ms > 0.0;
  const std::size_t first_timed = device.type == DeviceType::cuda ? 1 : 0;
  const std::size_t sets = buffers.sets.size();
  for (std::size_t i = 0; i < std::max<std::size_t>(kWarmUpCalls, sets); ++i) {
    cli::check_stop();
    if (i >= sets) restore(*buffers.sets[i % sets]);
    const double begin = now_ms();
    run_call(*buffers.sets[i % sets]);
    if (has_time) runtime::synchronize(device);
    const double middle = now_ms();
    run_limit(*buffers.sets[i % sets]);
    if (has_time) runtime::synchronize(device);
    const double call_ms = middle - begin, limit_ms = now_ms() - middle;
    if (has_time && i >= first_timed && call_ms + limit_ms > options_.row_ms / 3) {
      return measurement_of({call_ms, call_ms, call_ms, 1}, {limit_ms, limit_ms, limit_ms, 1});
    }
  }
  runtime::synchronize(device);
  const double begin = now_ms();
  restore_and_flush(*buffers.sets[0]);
  run_call(*buffers.sets[0]);
  flush_cache();
  run_limit(*buffers.sets[0]);
  runtime::synchronize(device);
  const double repetition_ms = std::max(1e-3, now_ms() - begin);
  const double affordable_ms = has_time ? options_.row_ms : kSlowRowMs;
  const int affordable = static_cast<int>(std::min(1e6, affordable_ms / repetition_ms));
  const int repetitions = std::min(options_.repetitions, std::max(has_time ? 1 : kMinimumRepetitions, affordable));

  auto call_stopwatches = make_stopwatches(device, repetitions);
  auto limit_stopwatches = make_stopwatches(device, repetitions);
  for (int i = 0; i < repetitions; ++i) {
    cli::check_stop();
    const auto index = static_cast<std::size_t>(i);
    Buffers::Set& set = *buffers.sets[index % sets];
    restore_and_flush(set);
    call_stopwatches[index]->start(context_.stream);
    run_call(set);
    call_stopwatches[index]->stop(context_.stream);
    flush_cache();
    limit_stopwatches[index]->start(context_.stream);
    run_limit(set);
    limit_stopwatches[index]->stop(context_.stream);
  }
  runtime::synchronize(device);

  return measurement_of(summarize(call_stopwatches), summarize(limit_stopwatches));
}

}  // namespace eaves::bench
