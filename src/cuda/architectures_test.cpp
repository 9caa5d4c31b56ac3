#include "cuda/architectures.h"

#include <gtest/gtest.h>

namespace eaves::cuda {
namespace {

TEST(Architectures, MachineCodeIsForItsGenerationFromItsMinorOn) {
  EXPECT_TRUE(has_code_for("80", 8, 0));
  EXPECT_TRUE(has_code_for("80", 8, 9));
  EXPECT_FALSE(has_code_for("80", 9, 0));
  EXPECT_FALSE(has_code_for("80", 7, 5));
  EXPECT_FALSE(has_code_for("86", 8, 0));
  EXPECT_TRUE(has_code_for("86", 8, 9));
  EXPECT_FALSE(has_code_for("100", 12, 0));
  EXPECT_FALSE(has_code_for("", 9, 0));
}

TEST(Architectures, MachineCodeWithALetterIsForOneGpu) {
  EXPECT_TRUE(has_code_for("90a", 9, 0));
  EXPECT_FALSE(has_code_for("90a", 8, 9));
  EXPECT_FALSE(has_code_for("100a", 10, 3));
}

TEST(Architectures, PtxIsForEverythingFromThereOn) {
  EXPECT_TRUE(has_code_for("90+", 9, 0));
  EXPECT_TRUE(has_code_for("90+", 12, 1));
  EXPECT_FALSE(has_code_for("90+", 8, 9));
  EXPECT_FALSE(has_code_for("90a+", 10, 0));
}

TEST(Architectures, OneEntryOfTheListIsEnough) {
  EXPECT_TRUE(has_code_for("80;90a;90+", 8, 6));
  EXPECT_TRUE(has_code_for("80;90a;90+", 9, 0));
  EXPECT_TRUE(has_code_for("80;90a;90+", 10, 0));
  EXPECT_FALSE(has_code_for("80;90a;90+", 7, 5));
  EXPECT_FALSE(has_code_for("80;90a", 10, 0));
}

}  // namespace
}  // namespace eaves::cuda
