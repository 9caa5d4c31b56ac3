# The private header core/build_config.h describes this build. Configuring writes it. The commit changes more often, so
# every build looks it up and writes its own file if it has changed: a new commit recompiles that file alone.
set(EAVES_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
string(REPLACE "GNU" "g++" EAVES_COMPILER "${EAVES_COMPILER}")
configure_file(cmake/build_config.h.in ${PROJECT_BINARY_DIR}/generated/core/build_config.h @ONLY)

find_package(Git QUIET)
set(EAVES_COMMIT_SOURCE ${PROJECT_BINARY_DIR}/generated/core/build_commit.cpp)
add_custom_target(
  eaves_commit
  COMMAND ${CMAKE_COMMAND} -D GIT=${GIT_EXECUTABLE} -D SOURCE_DIR=${PROJECT_SOURCE_DIR} -D
          OUTPUT=${EAVES_COMMIT_SOURCE} -P ${PROJECT_SOURCE_DIR}/cmake/write_commit.cmake
  BYPRODUCTS ${EAVES_COMMIT_SOURCE}
  COMMENT "Looking up the commit"
  VERBATIM)
