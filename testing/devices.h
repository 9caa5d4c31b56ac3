// Tests that run on every device: TEST_P of a fixture derived from OnEachDevice, instantiated with EAVES_EACH_DEVICE.
// Without a GPU its half is skipped, and the summary counts the skips.
#pragma once

#include <gtest/gtest.h>

#include "eaves/system.h"
#include "eaves/tensor.h"
#include "runtime/runtime.h"
#include "testing/runs.h"

namespace eaves::testing {

class OnEachDevice : public ::testing::TestWithParam<DeviceType> {
 protected:
  OnEachDevice() { device_of_test() = device(); }
  ~OnEachDevice() override { device_of_test() = kCpu; }
  void SetUp() override {
    if (GetParam() == DeviceType::cuda && runtime::gpu_count() == 0)
      GTEST_SKIP() << "no GPU: " << system_info().cuda_missing;
  }
  Device device() const { return {GetParam(), 0}; }
};

/// Tests that only a GPU can run.
class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (runtime::gpu_count() == 0) GTEST_SKIP() << "no GPU: " << system_info().cuda_missing;
  }
};

}  // namespace eaves::testing

#define EAVES_EACH_DEVICE(Fixture)                                                              \
  INSTANTIATE_TEST_SUITE_P(                                                                     \
      Devices, Fixture, ::testing::Values(::eaves::DeviceType::cpu, ::eaves::DeviceType::cuda), \
      [](const auto& info) { return info.param == ::eaves::DeviceType::cpu ? std::string("Cpu") : "Cuda"; })
