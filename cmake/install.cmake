# cmake --install: the headers, the library with its package for find_package(eaves), and the program.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/eaves)

install(TARGETS eaves EXPORT eaves-targets)
install(DIRECTORY include/eaves DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT eaves-targets NAMESPACE eaves:: DESTINATION ${package_dir})

configure_package_config_file(cmake/eaves-config.cmake.in ${PROJECT_BINARY_DIR}/eaves-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/eaves-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/eaves-config.cmake ${PROJECT_BINARY_DIR}/eaves-config-version.cmake
        DESTINATION ${package_dir})

if(EAVES_BUILD_CLI)
  install(TARGETS eaves_cli)
  # Highway, if it lies beside the programs: the installed program looks here too.
  install(DIRECTORY ${PROJECT_BINARY_DIR}/lib/ DESTINATION ${CMAKE_INSTALL_LIBDIR} OPTIONAL FILES_MATCHING PATTERN "libhwy*")
endif()
