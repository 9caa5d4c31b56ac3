# cmake -D GIT=<git> -D SOURCE_DIR=<tree> -D OUTPUT=<file.cpp> -P write_commit.cmake
# Writes the commit of the tree into a C++ file, if it has changed. "-dirty" follows the commit if tracked files differ.
set(commit unknown)
if(GIT AND EXISTS ${SOURCE_DIR}/.git)
  # Git refuses a tree of another user (a build as root); reading this one is safe.
  execute_process(
    COMMAND ${GIT} -c safe.directory=${SOURCE_DIR} --no-optional-locks describe --always --dirty --exclude=*
            --abbrev=40
    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
    RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit ${described})
  endif()
endif()

set(text "#include \"core/build_config.h\"\n\nconst char* const eaves::build::kCommit = \"${commit}\";\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL old)
  file(WRITE ${OUTPUT} "${text}")
endif()
