// Tests that parallel_for reaches every index exactly once, with any provider of threads.
#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace eaves::cpu {
namespace {

void expect_each_index_once(const ExecutionContext& context, std::int64_t count, std::int64_t grain) {
  const auto visits = std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(count));
  parallel_for(context, count, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) visits[static_cast<std::size_t>(i)].fetch_add(1);
  });
  for (std::int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(visits[static_cast<std::size_t>(i)].load(), 1) << "index " << i << " of " << count << ", grain " << grain;
  }
}

void check_many_sizes(const ExecutionContext& context) {
  for (const std::int64_t count : {0, 1, 2, 3, 63, 64, 65, 1000, 4097}) {
    for (const std::int64_t grain : {1, 7, 64, 5000}) expect_each_index_once(context, count, grain);
  }
}

/// A pool that runs each range of up to five pieces on its own thread.
struct ThreadPerRange {
  std::int64_t pieces_asked_for = 0;
  static void run(void* self, std::int64_t count, ParallelFor::Body body, void* body_data) {
    static_cast<ThreadPerRange*>(self)->pieces_asked_for = count;
    std::vector<std::thread> threads;
    for (std::int64_t begin = 0; begin < count; begin += 5) {
      threads.emplace_back([=] { body(body_data, begin, begin + 5 < count ? begin + 5 : count); });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST(ParallelFor, ReachesEveryIndexOnceWithAnyNumberOfThreads) {
  for (const int threads : {0, 1, 2, 3, 8}) check_many_sizes({.threads = threads});
}

TEST(ParallelFor, ReachesEveryIndexOnceOnTheCallersPool) {
  ThreadPerRange pool;
  check_many_sizes({.parallel_for = {&ThreadPerRange::run, &pool}});
}

TEST(ParallelFor, CutsWorkForTheCallersPoolIntoAsManyPiecesAsItMay) {
  ThreadPerRange pool;
  expect_each_index_once({.parallel_for = {&ThreadPerRange::run, &pool}}, 1000, 1);
  EXPECT_EQ(pool.pieces_asked_for, 64);
  expect_each_index_once({.threads = 3, .parallel_for = {&ThreadPerRange::run, &pool}}, 1000, 1);
  EXPECT_EQ(pool.pieces_asked_for, 3);
}

TEST(ParallelFor, RunsSmallWorkOnTheCallingThread) {
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for({.threads = 8}, 100, 100, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 100);
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
}

#if defined(_OPENMP)
TEST(ParallelFor, WorksInsideAParallelRegionOfTheCaller) {
#pragma omp parallel num_threads(3)
  check_many_sizes({.threads = 4});
}
#endif

TEST(ParallelFor, WorksInsideItself) {
  std::atomic<std::int64_t> sum{0};
  parallel_for({.threads = 4}, 16, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      parallel_for({.threads = 4}, 100, 1, [&](std::int64_t first, std::int64_t last) { sum.fetch_add(last - first); });
    }
  });
  EXPECT_EQ(sum.load(), 1600);
}

TEST(ParallelFor, WorksFromSeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([] { check_many_sizes({.threads = 2}); });
  for (std::thread& thread : threads) thread.join();
}

TEST(ParallelFor, WhatWasWrittenInsideIsSeenOutside) {
  // Plain memory on purpose: the thread sanitizer reports a race unless parallel_for tells it the order of a region.
  std::vector<int> values(100000, 1);
  for (int round = 0; round < 10; ++round) {
    parallel_for({.threads = 4}, static_cast<std::int64_t>(values.size()), 1000,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] *= 2;
                 });
    for (const int value : values) ASSERT_EQ(value, 2 << round);
  }
}

}  // namespace
}  // namespace eaves::cpu
